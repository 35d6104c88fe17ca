"""Prefill on one server, decode on another, over vLLM's file-based example connector, by HTTP.

Proves that `option.kv_transfer_config` and `option.kv_events_config` reach the engine. Requests and
answers have `kv_transfer_params` on vLLM's routes and on /invocations, whole and streamed. The
second server answers from the first one's blocks, with the text of a server that does both. Events
of the cache reach a subscriber. It runs on a CPU and on one machine.
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
from lmi_vllm.config.vllm_schema import installed_version

pytestmark = pytest.mark.vllm
# vLLM's connector looks at no parameters: this one hands on what it is given, as others do, and
# writes it down beside the cache.
CONNECTOR: Final = """
import json
import pathlib

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

class HandingOn(ExampleConnector):
    def request_finished(self, request, block_ids):
        noted = pathlib.Path(self._storage_path).with_name("given")
        with noted.open("a") as file:
            file.write(json.dumps(request.kv_transfer_params) + "\\n")
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
# Whether the last event of a stream has what the connector returns: since vLLM 0.33.
STREAMS_TELL: Final = tuple(map(int, str(installed_version()).split(".")[:2])) >= (0, 33)


@dataclass(frozen=True)
class Pair:
    """The two servers, the folder between them, and the first one's events."""

    prefill: str
    decode: str
    folder: Path
    events: Any

    def given(self) -> list[Any]:
        """Return what the connectors of both were given, request by request."""
        lines = self.folder.with_name("given").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

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
            start_server(folder, "--demo", "--port", "0", environ=environ, is_forked=True)
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


def _events(url: str, path: str, body: object) -> list[Any]:
    answer = call(url, path, body)
    assert answer.status == 200, answer.body
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines()]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def _delta(event: Any) -> str:
    """Return the text of one event; the last ones have none."""
    texts = (choice.get("text") or choice.get("delta", {}).get("content") for choice in
             event["choices"])  # fmt: skip
    return "".join(text or "" for text in texts)


def _text(answer: Any) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("shape", SHAPES)
def test_one_server_decodes_after_another_s_prefill(
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


@pytest.mark.parametrize("shape", SHAPES)
def test_streamed_answer_is_decoded_from_the_prefill(
    pair: Pair, demo_server: RunningServer, shape: str
) -> None:
    """The same, streamed by the second server: its connector has what the first one's said."""
    path, kind = SHAPES[shape]
    place, hits = f"a stream of {shape}", pair.hits()
    wanted: dict[str, object] = {"do_remote_decode": True, "request": place}
    first = _ask(pair.prefill, path, _body(kind, place, max_tokens=1, kv_transfer_params=wanted))
    params = first["kv_transfer_params"]
    more = {"max_tokens": 12, "stream": True, "kv_transfer_params": params}
    events = _events(pair.decode, path, _body(kind, place, **more))
    assert pair.given()[-2:] == [wanted, params]
    assert pair.hits() >= hits + BLOCK
    told = [event["kv_transfer_params"] for event in events if event.get("kv_transfer_params")]
    assert [one["given"] for one in told] == ([params] if STREAMS_TELL else [])
    alone = _ask(demo_server.url, path, _body(kind, place, max_tokens=12))
    assert "".join(map(_delta, events)) == _text(alone) != ""


def test_responses_stream_carries_the_connector_s_parameters(pair: Pair) -> None:
    """Its last event is the whole response, in every release."""
    params = {"do_remote_prefill": True, "request": "responses"}
    body = {"model": "lmi", "input": SENTENCE.format("Nice") * 12, "max_output_tokens": 4}
    body |= {"stream": True, "kv_transfer_params": params}
    (*_, last) = _events(pair.decode, "/v1/responses", body)
    assert last["response"]["kv_transfer_params"]["given"] == params


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
            found |= {event["lora_name"]: event for event in stored}
    assert {len(event["token_ids"]) % BLOCK for event in found.values()} == {0}
