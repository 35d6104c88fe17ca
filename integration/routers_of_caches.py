"""Routers that choose by the beginning of a prompt, or by what the caches of two real servers hold.

With one slot for adapters: an adapter that another has evicted is found where its blocks are, or
where its weights went.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest

from integration.adapters_support import SINGLE_THREAD, write_weights
from integration.client import Answer, OpenStream, call, running_requests, wait_until
from integration.conftest import RunningServer, start_server
from integration.fleet.model_routers import CHATS, ROUTERS, routed, router_commands, share
from integration.fleet.proxies import free_ports
from integration.llm_d import extracted
from integration.llm_d_events import published_at

pytestmark = pytest.mark.vllm

READ_SECONDS = 30.0
COMPLETIONS: Final = "/v1/completions"
NAMES: Final = ("fr", "de")
DOCUMENTS: Final = 12  # that a hash puts all on one server has a chance of 1 in 2,048
# vllm-router asks a server for the tokens of a prompt; the route is there with this option.
SCALE_OUT: Final = {"OPTION_ENABLE_SCALE_OUT": "true"}


@dataclass(frozen=True)
class Pair:
    """Two servers, and the words that tell vllm-router where their events are."""

    servers: Sequence[RunningServer]
    sources: tuple[str, ...]


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder of the routers' commands."""
    return router_commands()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Start both, each with the same two adapters and one slot."""
    folder = tmp_path_factory.mktemp("caches")
    weights = {name: write_weights(folder / name, at) for at, name in enumerate(NAMES)}
    ports = free_ports(2)
    words = ("--demo", "--max-loras", "1", "--max-cpu-loras", "1", "--port", "0")
    started = [
        start_server(
            folder, *words, environ=SINGLE_THREAD | SCALE_OUT | published_at(port), is_forked=True
        )
        for port in ports
    ]
    try:
        servers = [RunningServer(one, one.url_when_ready()) for one in started]
        for server in servers:
            for name, src in weights.items():
                assert call(server.url, f"/adapters?name={name}&src={src}", b"").status == 200
        block = extracted(call(servers[0].url, "/metrics").body.decode()).block_size
        told = ["--kv-event-model", "lmi", "--kv-event-block-size", str(block)]
        for server, port in zip(servers, ports, strict=True):
            told += ["--kv-event-source", f"{server.url}=tcp://127.0.0.1:{port}"]
        yield Pair(servers, tuple(told))
    finally:
        for one in started:
            one.kill()


def prompt(document: object, question: object) -> str:
    """A prompt of several blocks, which other questions on the same document begin with."""
    text = f"The sea number {document} is wide and the wind is cold. " * 30
    return f"Document {document}. {text} Question {question}?"


def request(path: str, text: str, model: str = "lmi", tokens: int = 1) -> dict[str, Any]:
    """A body of the route."""
    if path == "/invocations":
        return {"inputs": text, "parameters": {"max_new_tokens": tokens}}
    asked = [{"role": "user", "content": text}] if path == CHATS else text
    name = "messages" if path == CHATS else "prompt"
    return {"model": model, name: asked, "max_tokens": tokens}


def ask(url: str, path: str, document: object, question: object, model: str = "lmi") -> Answer:
    """Ask about a document."""
    return call(url, path, request(path, prompt(document, question), model))


@contextlib.contextmanager
def busy(url: str, path: str, pair: Pair, is_so: bool) -> Iterator[None]:
    """Have one server write a long answer while the body runs, if `is_so`."""
    if not is_so:
        yield
        return
    body = request(path, uuid4().hex, tokens=1500) | {"stream": True, "ignore_eos": True}
    stream = OpenStream(url, path, body)
    try:
        yield
    finally:
        stream.drop()
        idle = lambda: not any(running_requests(one.url) for one in pair.servers)  # noqa: E731
        assert wait_until(idle, READ_SECONDS)


BY_PREFIX = [(name, policy) for name, router in ROUTERS.items() for policy in router.by_prefix]


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize(("name", "policy"), BY_PREFIX)
def test_questions_on_one_document_stay_on_one_server(
    commands: Path, pair: Pair, name: str, policy: tuple[str, ...], path: str
) -> None:
    """Half of the documents are new while one server is busy; idle servers stay with them."""
    homes = set()
    with routed(commands, name, pair.servers, policy) as url:
        for number in range(DOCUMENTS):
            document = f"{name}-{path[-9:]}-{policy[-1]}-{number}"
            with busy(url, path, pair, number % 2 == 1):
                parts = share(pair.servers, partial(ask, url, path, document, 0), 1, path)
            for question in range(1, 4):
                again = share(pair.servers, partial(ask, url, path, document, question), 1, path)
                assert again == parts, (number, question)
            homes.add(parts.index(1))
    assert homes == {0, 1}


def test_lmi_bodies_are_not_chosen_by_their_prefix(commands: Path, pair: Pair) -> None:
    """vllm-router passes them to the server with the least to do."""
    path = "/invocations"
    with routed(commands, "vllm-router", pair.servers, ROUTERS["vllm-router"].by_prefix[0]) as url:
        question = partial(ask, url, path, "lmi", 0)
        idle = share(pair.servers, question, 4, path)
        assert sorted(idle) == [0, 4]
        with busy(url, COMPLETIONS, pair, is_so=True):
            assert share(pair.servers, question, 4, path) == idle[::-1]


def test_router_of_events_goes_where_the_blocks_are(commands: Path, pair: Pair) -> None:
    """Those of the base model: it does not look for blocks of the adapter that a request names."""
    policy = ("--policy", "kv_aware", *pair.sources)
    with routed(commands, "vllm-router", pair.servers, policy) as url:

        def goes_to(document: object, model: str = "lmi") -> int:
            question = partial(ask, url, COMPLETIONS, document, uuid4().hex, model)
            return share(pair.servers, question, 1, COMPLETIONS).index(1)

        def has_heard() -> bool:
            """Whether the router knows of blocks that the second server has just stored."""
            document = uuid4().hex
            ask(pair.servers[1].url, COMPLETIONS, document, 0)
            return goes_to(document) == 1

        for document in range(4):
            ask(pair.servers[document % 2].url, COMPLETIONS, document, 0)
            ask(pair.servers[1 - document % 2].url, COMPLETIONS, document, 0, "fr")
        assert wait_until(has_heard, READ_SECONDS)
        for model in ("lmi", "fr"):
            assert [goes_to(document, model) for document in range(4)] == [0, 1, 0, 1], model


def test_picker_of_metrics_follows_an_evicted_adapter(pair: Pair) -> None:
    """By the rules of llm-d: where it is, nowhere while it is nowhere, and where it was loaded."""

    def scores(model: str) -> list[float]:
        texts = (call(one.url, "/metrics").body.decode() for one in pair.servers)
        return [extracted(text).affinity(model) for text in texts]

    def becomes(**expected: list[float]) -> None:
        assert wait_until(lambda: {name: scores(name) for name in expected} == expected, 30), (
            scores("fr"), scores("de"),
        )  # fmt: skip

    ask(pair.servers[0].url, COMPLETIONS, 0, 0, "fr")
    ask(pair.servers[1].url, COMPLETIONS, 0, 0, "de")
    becomes(fr=[1, 0], de=[0, 1])
    ask(pair.servers[0].url, COMPLETIONS, 0, 0, "de")
    becomes(fr=[0, 0], de=[1, 1])
    ask(pair.servers[1].url, COMPLETIONS, 0, 0, "fr")
    becomes(fr=[0, 1], de=[1, 0])
