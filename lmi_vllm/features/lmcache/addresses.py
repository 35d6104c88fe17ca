"""Addresses of vLLM's own sockets that others cannot reach, though nothing fails."""

import ipaddress
import socket
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from lmi_vllm.features.lmcache.rules import LmcacheSettings, connectors
from lmi_vllm.translate.draft import ArgumentDraft

_EVENTS: Final = "kv_events_config"
_SIDE_CHANNEL: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"


def check_event_endpoint(draft: ArgumentDraft) -> None:
    """Warn of events that vLLM sends to this machine, where a subscriber is meant to come for them.

    Its publisher listens on a wildcard or a Unix socket, and connects to any other address.
    """
    config = draft.values.get(_EVENTS)
    if not isinstance(config, Mapping) or config.get("publisher") == "null":
        return
    endpoint = config.get("endpoint")
    if not config.get("enable_kv_cache_events") or not isinstance(endpoint, str):
        return
    if "*" in endpoint or "::" in endpoint or not _is_of_this_machine(endpoint):
        return
    listening = f"tcp://*:{endpoint.rpartition(':')[2]}"
    if draft.values.get("data_parallel_size", 1) == 1:  # copies need a port each
        listening += ", or ipc:///PATH for this machine alone"
    draft.warn(
        f"{draft.label(_EVENTS)}: vLLM connects to endpoint {endpoint} and does not listen there, "
        f"so only a subscriber that listens there itself gets events. For others write {listening}"
    )


def check_side_channel(draft: ArgumentDraft) -> None:
    """Warn of NIXL's handshake on localhost, its default: another machine would ask itself."""
    settings = draft.settings.feature(LmcacheSettings)
    is_set = draft.environ is None or _SIDE_CHANNEL in draft.environ
    if is_set or not any(one.startswith("Nixl") for one in connectors(settings.kv_transfer_config)):
        return
    said = settings.details.kv_transfer_config
    draft.warn(
        f"{said.label}: NIXL answers other servers on localhost, so only those of this machine can "
        f"fetch blocks. For others set {_SIDE_CHANNEL} to an address of this machine",
        said,
    )


def _is_of_this_machine(endpoint: str) -> bool:
    """Whether the host is localhost or an address that this machine has; no name is looked up."""
    host = urlsplit(endpoint).hostname
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    with socket.socket(family) as tried:
        try:
            tried.bind((str(address), 0))
        except OSError:  # another machine's
            return False
    return True
