"""A name that clients choose is never looked up by vLLM, and routers see it (DECISIONS.md 116).

vLLM takes the adapter whose name is the first word of the type of a message's part. Its events of
the KV cache have the names of loads, which no request uses.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import zmq
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolverRegistry

from lmi_vllm.checks.safetensors_header import rename_tensors
from lmi_vllm.engine.vllm.bridge import Bridge
from lmi_vllm.engine.vllm.workarounds import is_affected
from lmi_vllm.messages import HttpCall, OpenAICall
from tests.contract.adapter_loader import IDS, Loader
from tests.contract.conftest import LoopThread
from tests.support.adapter_files import WEIGHTS, make_adapter, read_header

pytestmark = pytest.mark.vllm

WORDS = ("text", "input")  # in types of parts of chats and of responses
LONG_PROMPT = "The sea is wide and the wind is cold. " * 40  # of more than one block
READ_MS = 10_000
JSON = [(b"content-type", b"application/json")]


@pytest.fixture
def adapters(run: LoopThread, vllm_engine: Any) -> Iterator[Loader]:
    """Load adapters into the session's engine; unload them afterwards."""
    loader = Loader(run, vllm_engine)
    yield loader
    for ref in loader.loaded:
        loader.unload(ref)


def chat(kind: str = "text") -> dict[str, Any]:
    """A chat with a part of this type."""
    content = [{"type": kind, "text": "What is the capital of France?"}]
    messages = [{"role": "user", "content": content}]
    return {"model": "lmi", "messages": messages, "max_tokens": 24, "temperature": 0}


def bodies() -> dict[str, dict[str, Any]]:
    """One request for the base model for each route whose parts have types."""
    parts = [{"type": "input_text", "text": "What is the capital of France?"}]
    response = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 24}
    batch = {**chat(), "messages": [chat()["messages"]] * 2}
    return {
        "/v1/chat/completions": chat(),
        "/v1/chat/completions/batch": batch,
        "/v1/messages": chat(),
        "/v1/responses": {"model": "lmi", "temperature": 0, **response},
    }


def texts(loader: Loader, path: str, body: dict[str, Any]) -> list[Any]:
    """What the route answers, without ids and times, and what the lane answers, if it has one."""
    call = HttpCall("POST", path, "", JSON, orjson.dumps(body), f"names-{next(IDS)}")
    replies = [loader.run(loader.engine.http.call(call))]
    if path == "/v1/chat/completions":
        lane = OpenAICall("chat/completions", body, {}, f"names-{next(IDS)}")
        replies.append(loader.run(loader.engine.answer_openai(lane)))
    assert [reply.status for reply in replies] == [200] * len(replies), replies
    names = ("model", "choices", "content", "output")
    documents = [orjson.loads(reply.body) for reply in replies]
    return [_without_ids({name: each.get(name) for name in names}) for each in documents]


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(item) for key, item in value.items() if key != "id"}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", bodies())
def test_word_of_a_part_s_type_chooses_no_adapter(
    path: str, adapters: Loader, tmp_path: Path
) -> None:
    """The base model answers as before, whatever the names of adapters are."""
    before = texts(adapters, path, bodies()[path])
    for seed, word in enumerate(WORDS):
        adapters.load(make_adapter(tmp_path / word, seed), word)
    assert texts(adapters, path, bodies()[path]) == before
    assert all(answer["model"] == "lmi" for answer in before)


def test_resolver_of_vllm_s_loads_nothing(
    adapters: Loader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plug-in of vLLM's would load what `model` names: unchecked, and under an id of its own."""
    asked: list[str] = []

    class Resolver:
        async def resolve_lora(self, _base: str, name: str) -> LoRARequest:
            asked.append(name)
            return LoRARequest(name, 1, str(make_adapter(tmp_path / name)))

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setattr(LoRAResolverRegistry, "resolvers", {"a plug-in": Resolver()})
    llm = adapters.engine._llm
    bridge = adapters.run(Bridge.create(llm, llm.setup.arguments.namespace, llm.setup.profile))
    body = orjson.dumps({**chat(), "model": "unknown"})
    call = HttpCall("POST", "/v1/chat/completions", "", JSON, body, "names")
    assert adapters.run(bridge.call(call)).status == 404
    assert not asked


class Events:
    """A subscriber of the engine's events of its KV cache, as a router is one."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")

    def stored(self) -> list[tuple[str | None, frozenset[Any], Any]]:
        """The name, blocks and further keys of each event of the next message that has one."""
        while self._socket.poll(READ_MS):
            _, _, batch = self._socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(batch)
            found = [event for event in events if event["type"] == "BlockStored"]
            if found:
                return [
                    (one["lora_name"], frozenset(one["block_hashes"]), one["extra_keys"])
                    for one in found
                ]
        raise AssertionError("no event came")

    def close(self) -> None:
        """Leave."""
        self._socket.close(linger=0)


@pytest.fixture
def events(adapters: Loader) -> Iterator[Events]:
    """A subscriber that the engine knows."""
    config = adapters.engine._llm.vllm_config.kv_events_config
    found = Events(config.endpoint)
    for attempt in range(100):  # what is published before the engine knows it is lost
        adapters.ask(prompt=f"{attempt} {LONG_PROMPT}")
        if found._socket.poll(50):
            break
    while found._socket.poll(200):
        found._socket.recv_multipart()
    yield found
    found.close()


def test_event_of_the_cache_has_the_name_of_requests(
    adapters: Loader, events: Events, tmp_path: Path
) -> None:
    """Two loads of one name show that name, and share no block with each other or the base."""
    first, second = (
        adapters.load(make_adapter(tmp_path / str(seed), seed), "fr@home") for seed in (1, 2)
    )
    blocks: list[frozenset[Any]] = []
    for ref, shown in ((None, None), (first, "fr@home"), (second, "fr@home")):
        adapters.ask(ref, f"One prompt for all. {LONG_PROMPT}")
        for name, hashes, keys in events.stored():
            assert name == shown
            assert keys == ([None] * len(hashes) if ref is None else [["fr@home"]] * len(hashes))
            blocks.append(hashes)
    assert len(frozenset().union(*blocks)) == sum(map(len, blocks)) > len(blocks)


OWN_SCALE: dict[str, Any] = (  # 0.31 reads none
    {} if is_affected("vllm", "0.32") else {"alpha_pattern": {"q_proj": 2}}
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", "base_model.model._orig_mod."),
        ("base_model.model.", "module.base_model.model."),
        (".weight", ".default.weight"),
        ("base_model.model.model.", "base_model.model."),
    ],
)
def test_weights_with_names_of_a_wrapper_answer_as_without(
    adapters: Loader, tmp_path: Path, old: str, new: str
) -> None:
    """In the engine's copy they are renamed: alone, and with a rank and a scale of their own."""
    plain = make_adapter(tmp_path / "plain", 3, **OWN_SCALE)
    wrapped = make_adapter(tmp_path / "wrapped", 3, **OWN_SCALE)
    names = {name: name.replace(old, new) for name in read_header(plain / WEIGHTS)}
    rename_tensors(plain / WEIGHTS, wrapped / WEIGHTS, names)
    expected = adapters.ask(adapters.load(plain))
    assert adapters.ask(adapters.load(wrapped)) == expected != adapters.ask()
