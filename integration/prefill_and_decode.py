"""Prefill on one server, decode on another, over vLLM's file-based example connector, by HTTP.

Proves that `option.kv_transfer_config` and `option.kv_events_config` reach the engine, that
`kv_transfer_params` go in and come out on vLLM's routes and on /invocations, that the second server
answers from what the first one has computed, with the text of a server that does both, and that the
events of the cache reach a subscriber. On a CPU and on one machine: what it shows is the way.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from integration.adapters_support import SINGLE_THREAD
from integration.client import call
from integration.conftest import RunningServer, start_server

pytestmark = pytest.mark.vllm
# vLLM's connector looks at no parameters: this one hands on what it is given, as others do.
CONNECTOR: Final = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class HandingOn(ExampleConnector):
    def request_finished(self, request, block_ids):
        return False, {"do_remote_prefill": True, "given": request.kv_transfer_params}
"""
SENTENCE: Final = "The moon is high and the sea is calm; a ship sails home from {}. "
BLOCK: Final = 128  # tokens of a block on a CPU; a prompt that is shorter is not kept
HITS: Final = "vllm:external_prefix_cache_hits_total{"
SHAPES: Final = {
    "completions": ("/v1/completions", "prompt"),
    "chat": ("/v1/chat/completions", "messages"),
    "completion on /invocations": ("/invocations", "prompt"),
    "chat on /invocations": ("/invocations", "messages"),
}


@dataclass(frozen=True)
class Pair:
    """The two servers, the folder between them, and the first one's events."""

    prefill: str
    decode: str
    folder: Path
    events: Any

    def hits(self) -> int:
        """Return how many tokens the second server did not have to compute."""
        text = call(self.decode, "/metrics").body.decode()
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if HITS in line)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start both; neither computes what the other one does."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    import zmq  # noqa: PLC0415 (comes with vLLM)

    folder = tmp_path_factory.mktemp("pair")
    (folder / "handing_on.py").write_text(CONNECTOR, encoding="utf-8")
    (folder / "cache").mkdir()
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.setsockopt(zmq.SUBSCRIBE, b"")
        port = events.bind_to_random_port("tcp://127.0.0.1")
        told = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
        variables = {"OPTION_KV_EVENTS_CONFIG": json.dumps(told)}
        servers = [
            start_server(folder, "--demo", "--port", "0", environ=environ)
            for environ in (_role(folder, "kv_producer") | variables, _role(folder, "kv_consumer"))
        ]
        try:
            prefill, decode = (server.url_when_ready() for server in servers)
            yield Pair(prefill, decode, folder / "cache", events)
        finally:
            for server in servers:
                server.kill()


def _role(folder: Path, role: str) -> dict[str, str]:
    connector = {
        "kv_connector": "HandingOn",
        "kv_connector_module_path": "handing_on",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "cache")},
    }
    return {
        **SINGLE_THREAD,
        "OPTION_KV_TRANSFER_CONFIG": json.dumps(connector),
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent.parent), str(folder))),
    }


def _body(kind: str, place: str, **more: object) -> dict[str, object]:
    text = SENTENCE.format(place) * 12
    asked = [{"role": "user", "content": text}] if kind == "messages" else text
    return {"model": "lmi", kind: asked, "temperature": 0, **more}


def _ask(url: str, path: str, body: object) -> Any:
    answer = call(url, path, body)
    assert answer.status == 200, answer.body
    return answer.json()


def _text(answer: Any) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("shape", SHAPES)
def test_one_server_decodes_what_another_has_prefilled(
    pair: Pair, demo_server: RunningServer, shape: str
) -> None:
    """As a router does it: one token here, then the rest there with what the first answer says."""
    path, kind = SHAPES[shape]
    known, hits = set(pair.folder.iterdir()), pair.hits()
    wanted: dict[str, object] = {"do_remote_decode": True, "request": shape}
    first = _ask(pair.prefill, path, _body(kind, shape, max_tokens=1, kv_transfer_params=wanted))
    params = first["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["given"]) == (True, wanted)
    (kept,) = set(pair.folder.iterdir()) - known
    written = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    second = _ask(pair.decode, path, _body(kind, shape, max_tokens=12, kv_transfer_params=params))
    assert second["kv_transfer_params"]["given"] == params
    assert pair.hits() >= hits + BLOCK
    assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == written
    alone = _ask(demo_server.url, path, _body(kind, shape, max_tokens=12))
    assert _text(second) == _text(alone) != ""


def test_request_of_lmi_s_shape_is_decoded_from_the_prefill(
    pair: Pair, demo_server: RunningServer
) -> None:
    """It has no such parameters; a connector that needs none works for it as well."""
    body = {"inputs": SENTENCE.format("Rome") * 12, "parameters": {"max_new_tokens": 12}}
    hits = pair.hits()
    _ask(pair.prefill, "/invocations", {**body, "parameters": {"max_new_tokens": 1}})
    answer = _ask(pair.decode, "/invocations", body)
    assert answer == _ask(demo_server.url, "/invocations", body)
    assert pair.hits() >= hits + BLOCK


def test_events_of_the_cache_reach_a_subscriber(pair: Pair) -> None:
    """Each block that is kept, with its tokens; an adapter's with the name of its load."""
    import msgspec  # noqa: PLC0415 (comes with vLLM)

    found: dict[str | None, dict[str, Any]] = {}
    deadline, tries = time.monotonic() + 60, 0
    while not {None, "capitals"} <= found.keys():
        assert time.monotonic() < deadline, found
        tries += 1
        for model in ("lmi", "capitals"):
            place = f"{model} {tries}"
            _ask(pair.prefill, "/v1/completions", _body("prompt", place, max_tokens=1, model=model))
        while pair.events.poll(1000):
            _, batch, _ = msgspec.msgpack.decode(pair.events.recv_multipart()[2])
            stored = [event for event in batch if event["type"] == "BlockStored"]
            found |= {_adapter(event): event for event in stored}
    assert {len(event["token_ids"]) % BLOCK for event in found.values()} == {0}


def _adapter(event: dict[str, Any]) -> str | None:
    """Return the adapter of a block: the load is `name@number`."""
    load: str | None = event["lora_name"]
    return None if load is None else load.rpartition("@")[0]
