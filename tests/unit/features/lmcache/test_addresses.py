"""Sockets of vLLM's that others cannot reach are named at the start, and the rest is not."""

import itertools
import json
import socket

import psutil
import pytest

from tests.unit.conftest import ExplainRun

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


def event_warnings(explained: ExplainRun, **config: object) -> list[str]:
    """Return what is said of events with this configuration."""
    run = explained(f"option.kv_events_config={json.dumps(config)}")
    assert run.errors == []
    return [text for text in run.warnings if "kv_events_config" in text]


def own_address() -> str:
    """Return an address of this machine, beyond the loopback's if it has one."""
    places = itertools.chain.from_iterable(psutil.net_if_addrs().values())
    return max(
        (place.address for place in places if place.family == socket.AF_INET),
        key=lambda address: not address.startswith("127."),
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "localhost", "own"])
def test_events_sent_to_this_machine_itself_are_named(explained: ExplainRun, host: str) -> None:
    """Where vLLM connects, a router that connects as well waits for ever."""
    host = own_address() if host == "own" else host
    (said,) = event_warnings(
        explained, enable_kv_cache_events=True, endpoint=f"tcp://{host}:5557", publisher="zmq"
    )
    assert "serving.properties" in said
    assert f"connects to endpoint tcp://{host}:5557" in said
    assert "tcp://*:5557" in said
    assert "ipc:///" in said


@pytest.mark.parametrize(
    "config",
    [
        {"endpoint": "tcp://*:5557"},
        {"endpoint": "tcp://[::]:5557"},
        {"endpoint": "ipc:///tmp/events"},
        {"endpoint": "inproc://events"},
        {"endpoint": "tcp://epp.llm-d.svc:5557"},  # a picker that listens
        {"endpoint": "tcp://192.0.2.1:5557"},
        {"endpoint": "tcp://127.0.0.1:5557", "enable_kv_cache_events": False},
        {"endpoint": "tcp://127.0.0.1:5557", "publisher": "null"},
        {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://127.0.0.1:5558"},  # always listens
        {},
    ],
)
def test_events_that_are_received_are_not_warned_of(
    explained: ExplainRun, config: dict[str, object]
) -> None:
    """It listens, a subscriber elsewhere does, or nothing is published."""
    assert event_warnings(explained, **{"enable_kv_cache_events": True, **config}) == []


def test_copies_are_told_no_unix_socket(explained: ExplainRun) -> None:
    """Each has a port of its own, counted from the one that is named; a path ends their start."""
    config = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557"})
    lines = f"option.kv_events_config={config}\noption.data_parallel_size=2"
    (said,) = [text for text in explained(lines).warnings if "kv_events_config" in text]
    assert said.endswith("For others write tcp://*:5557")


def test_nixl_on_localhost_is_named_until_it_has_an_address(explained: ExplainRun) -> None:
    """Its default is for servers of one machine; a variable or option.env sets it."""
    name = "VLLM_NIXL_SIDE_CHANNEL_HOST"
    line = f"option.kv_transfer_config={NIXL}"
    assert sum(name in text for text in explained(line).warnings) == 1
    assert not any(name in text for text in explained(line, {name: "10.0.0.1"}).warnings)
    env = f"{line}\noption.env={name}=10.0.0.1"
    assert not any(name in text for text in explained(env).warnings)
    other = 'option.kv_transfer_config={"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}'
    assert not any(name in text for text in explained(other).warnings)
