"""Several nodes that serve one model: how many, which one this is, who leads.

vLLM's own arguments first, then LMI's variables, then those of a Kubernetes LeaderWorkerSet. Every
node runs the same command with the same options; only rank 0 answers HTTP.
"""

import ipaddress
import logging
import re
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import maps_to, option, variable
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.messages import DEFAULT_ORIGIN, EngineArguments
from lmi_vllm.translate.draft import ArgumentDraft

logger = logging.getLogger(__name__)

MASTER_PORT: Final = 29500  # torch's
_KUBERNETES: Final = ".svc.cluster.local"
_LOOK_UP_SECONDS: Final = 60.0  # as LMI: a pod's name resolves some time after the pod starts
_LOOK_UP_PAUSE: Final = 2.0
_LAST_PORT: Final = 65535


class ClusterSettings(FeatureSettings):
    """How many nodes serve the model, which one this is, who leads."""

    # fmt: off
    nnodes: int | None = option(parse.as_vllm, maps_to("nnodes"), section="Devices and copies",
        values="number", note="Nodes that serve one model, with vLLM's own name.")
    node_rank: int | None = option(parse.as_vllm, maps_to("node_rank"), values="number",
        section="Devices and copies", note="This node's number, with vLLM's own name.")
    vllm_master_addr: str | None = option(parse.as_vllm, maps_to("master_addr"), values="host",
        name="master_addr", section="Devices and copies",
        note="Host of the leading node, with vLLM's own name.")
    djl_cluster_size: int | None = variable(parse.positive_int, "Nodes that serve one model.",
        values="number")
    lws_group_size: int | None = variable(parse.positive_int, "The same, set by LeaderWorkerSet.",
        values="number")
    djl_leader_addr: str | None = variable(parse.any_text, "Host of the leading node.",
        values="host")
    lws_leader_address: str | None = variable(parse.any_text, "The same, set by LeaderWorkerSet.",
        values="host")
    lws_leader_addr: str | None = variable(parse.any_text,
        "Set: the leader's name is completed with .svc.cluster.local.", values="host")
    djl_worker_addr_format: str | None = variable(parse.any_text,
        "Accepted, without effect: nodes come to the leader by themselves.")
    djl_node_rank: int | None = variable(parse.count, "This node's number.", values="number")
    lws_worker_index: int | None = variable(parse.count,
        "This node's number, set by LeaderWorkerSet.", values="number")
    master_addr: str | None = variable(parse.any_text, "Host of the leading node.", values="host")
    # fmt: on


def put_cluster(draft: ArgumentDraft) -> None:
    """Put the engine arguments of a model on several nodes; report settings that exclude them."""
    settings = draft.settings
    sizes, ranks, leaders = _sizes(settings), _ranks(settings), _leaders(settings)
    size, rank, leader = map(_first_set, (sizes, ranks, leaders))
    nodes, number = _int_value(size, 1), _int_value(rank, 0)
    if size is None or nodes <= 1:
        _warn_of_one_node(draft, (*ranks, *leaders[:2]))
        return
    if rank is not None and not 0 <= number < nodes:
        draft.fail(f"{_stated(rank)}: the {nodes} nodes of {size.name} are 0 to {nodes - 1}", rank)
    if leader is None:
        draft.fail(
            f"{_stated(size)} needs the leader's address, as every node reaches it: set "
            f"DJL_LEADER_ADDR (or MASTER_ADDR)",
            size,
        )
    elif not _is_host(str(leader.value)):
        draft.fail(
            f"{_stated(leader)}: a host name or an IP address is needed, without a scheme or a "
            f"port (option.master_port is the port, {MASTER_PORT} unless it is set)",
            leader,
        )
    for alike in (sizes, ranks, leaders[:-1]):
        _warn_of_others(draft, alike)
    _refuse(draft, size)
    draft.put("nnodes", nodes, size.origin)
    draft.put("node_rank", number, DEFAULT_ORIGIN if rank is None else rank.origin)
    if leader is not None:
        draft.put("master_addr", _leader_host(settings, leader), leader.origin)
    draft.put_if_unset("master_port", MASTER_PORT, DEFAULT_ORIGIN)
    draft.put_if_unset("distributed_executor_backend", "mp", DEFAULT_ORIGIN)


def _refuse(draft: ArgumentDraft, size: Setting) -> None:
    """Report settings that exclude several nodes."""
    model, more_than_one = draft.settings.model, f"is not possible with {_stated(size)}"
    if model.enable_lora:
        draft.fail(f"enable_lora=True {more_than_one}: adapters are kept on the leader's disk only")
    if model.data_parallel_size not in (None, 1):
        copies = f"data_parallel_size={model.data_parallel_size}"
        draft.fail(f"{copies} {more_than_one}: copies of a model stay on one node each")
    if draft.values.get("distributed_executor_backend") not in (None, "mp"):
        draft.fail(
            f"{_argument(draft, 'distributed_executor_backend')} is not possible with "
            f"{_stated(size)}: nodes of this kind need mp. Ray knows its nodes itself: with it, "
            f"serve runs on one of them and no number of nodes is set"
        )
    port = draft.values.get("master_port")
    if isinstance(port, int) and not 0 < port < _LAST_PORT:
        draft.fail(
            f"{_argument(draft, 'master_port')}: 1 to {_LAST_PORT - 1} are possible (the port "
            f"after it is used too)"
        )


def _warn_of_one_node(draft: ArgumentDraft, settings: Iterable[Setting]) -> None:
    """Warn of a node number or leader without a cluster size, which has no effect."""
    for setting in settings:
        if setting.is_set and setting.value != 0:
            draft.warn(
                f"{_stated(setting)} has no effect: this node serves the model alone, because "
                f"neither DJL_CLUSTER_SIZE nor LWS_GROUP_SIZE is above 1",
                setting,
            )


def _warn_of_others(draft: ArgumentDraft, alike: Iterable[Setting]) -> None:
    """Warn of settings that contradict the one that is used."""
    found = [setting for setting in alike if setting.is_set]
    for other in found[1:]:
        if other.value != found[0].value:
            draft.warn(f"{_stated(other)} has no effect: {_stated(found[0])} counts", other)


def follows(settings: Settings) -> bool:
    """Whether this node is a follower: its rank is above 0 in a cluster of several."""
    size, rank = _first_set(_sizes(settings)), _first_set(_ranks(settings))
    return _int_value(size, 1) > 1 and _int_value(rank, 0) > 0


def node_rank(arguments: EngineArguments) -> int:
    """Return this node's rank in its cluster; 0 for the leader, and for a node alone."""
    return arguments.number("node_rank", 0) if arguments.number("nnodes", 1) > 1 else 0


def cluster_exports(arguments: EngineArguments, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell vLLM, gloo and NCCL this node's address, unless set already.

    Blocks while the leader's name is looked up, for a minute at most.

    Raises:
        ConfigurationError: the leader's name cannot be resolved.
    """
    if arguments.number("nnodes", 1) <= 1:
        return {}
    leader = str(arguments.values["master_addr"])
    port = arguments.number("master_port", MASTER_PORT)
    own = environ.get("VLLM_HOST_IP", "")
    if not own:
        own = own_address(leader, port)
        if node_rank(arguments) == 0:
            _warn_unless_we_lead(leader, port, own)
    exports = {"VLLM_HOST_IP": own}
    if interface := interface_of(own):
        exports |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: value for name, value in exports.items() if not environ.get(name)}


def own_address(leader: str, port: int, seconds: float = _LOOK_UP_SECONDS) -> str:
    """Return this machine's address on the route to `leader`; no packet is sent.

    Raises:
        ConfigurationError: within `seconds` the name did not resolve, or has no route.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            addresses = socket.getaddrinfo(leader, port, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, address = addresses[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    [
                        f"the leader {leader} cannot be found: {error.strerror or error}; check "
                        "option.master_addr, DJL_LEADER_ADDR, LWS_LEADER_ADDRESS or MASTER_ADDR"
                    ]
                ) from error
            time.sleep(_LOOK_UP_PAUSE)


def _warn_unless_we_lead(leader: str, port: int, own: str) -> None:
    """Warn of a leader's address that is not this machine's: a rank of 0 may be a rank left out."""
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(leader, port)}
    if own not in addresses:
        logger.warning(
            "this is node 0, so it leads, but the leader %s is %s and this machine %s: nodes "
            "behind the leader need DJL_NODE_RANK (1, 2, ...)",
            leader,
            ", ".join(sorted(addresses)),
            own,
        )


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has `address`; None without one."""
    import psutil  # noqa: PLC0415 (vLLM brings it, and `explain` has to work without)

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return str(name)
    return None


def _sizes(settings: Settings) -> tuple[Setting, ...]:
    """Return what may say how many nodes there are, vLLM's own argument first."""
    said = settings.feature(ClusterSettings).details
    return said.nnodes, said.djl_cluster_size, said.lws_group_size


def _ranks(settings: Settings) -> tuple[Setting, ...]:
    """Return what may say which of the nodes this one is."""
    said = settings.feature(ClusterSettings).details
    return said.node_rank, said.djl_node_rank, said.lws_worker_index


def _leaders(settings: Settings) -> tuple[Setting, ...]:
    """Return what may say where the first node is; MASTER_ADDR, the last, is many programs'."""
    said = settings.feature(ClusterSettings).details
    return said.vllm_master_addr, said.djl_leader_addr, said.lws_leader_address, said.master_addr


def _first_set(alike: Iterable[Setting]) -> Setting | None:
    """Return the first of these settings that is set."""
    return next((setting for setting in alike if setting.is_set), None)


def _int_value(setting: Setting | None, default: int) -> int:
    """Return the setting's integer, else `default`."""
    return setting.value if setting is not None and isinstance(setting.value, int) else default


def _stated(setting: Setting) -> str:
    """Return the setting as it was written; an environment variable's name is not repeated."""
    return setting.stated.removesuffix(f" ({setting.name})")


def _argument(draft: ArgumentDraft, name: str) -> str:
    """Return an engine argument with its value and origin, for a message."""
    return f"{name}={draft.values[name]} ({draft.origins[name]})"


def _is_host(text: str) -> bool:
    """Whether the text is a host name or an IP address; `host:port` and URLs are not."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", text) is not None
    return True


def _leader_host(settings: Settings, setting: Setting) -> str:
    """Return the leader's host; in a LeaderWorkerSet with the cluster's domain, as LMI has it."""
    leader = str(setting.value)
    if not settings.feature(ClusterSettings).lws_leader_addr or leader.endswith(_KUBERNETES):
        return leader
    return leader + _KUBERNETES
