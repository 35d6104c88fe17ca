"""Routers of language models in front of two servers: vllm-router, sglang-router and smg, of PyPI.

What each passes on and keeps together is what docs/routers.md says of it. On the scripted engine: a
router sees routes, lists of models, health and cut connections, and no tokens.
"""

import signal
import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest

from integration.client import OpenStream, call, wait_until
from integration.conftest import SCRIPTED, TEN_TOKENS_A_SECOND, RunningServer, StartServer
from integration.fleet.model_routers import (
    CHAT,
    CHATS,
    ROUTERS,
    chat,
    routed,
    router_commands,
    share,
)

LOAD_THREADS = 4
# smg knows the first model of a server's list; the scripted engine's has adapters only.
MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {"vllm-router": "lmi", "sglang-router": "lmi", "smg": "capitals"}
)
OF_ADAPTER: Final = {**CHAT, "model": "capitals"}
LMI: Final = {"inputs": "The sea is wide", "parameters": {"max_new_tokens": 4}}
ALL: Final = frozenset(ROUTERS)
ONLY_VLLM_S: Final = frozenset({"vllm-router"})
# The route, the body, and the routers that pass it on: the others answer it themselves.
PASSED: Final = (
    (CHATS, CHAT, ALL),
    (CHATS, {**CHAT, "stream": True}, ALL),
    ("/v1/completions", {"model": "lmi", "prompt": "The sea"}, ALL),
    (CHATS, OF_ADAPTER, ALL - {"smg"}),  # it knows the first model of a list
    ("/v1/completions", {"model": "lmi", "prompt": [1, 2]}, ONLY_VLLM_S),
    ("/invocations", LMI, ONLY_VLLM_S),
    ("/invocations", {**LMI, "stream": True}, ONLY_VLLM_S),
    ("/adapters", None, ONLY_VLLM_S),
    ("/ping", None, ONLY_VLLM_S),
)


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder of the routers' commands."""
    return router_commands()


@pytest.fixture
def servers(server_process: StartServer) -> list[RunningServer]:
    """Two ready servers, ten tokens a second."""
    started = [
        server_process(*SCRIPTED, "--port", "0", environ=TEN_TOKENS_A_SECOND) for _ in range(2)
    ]
    return [RunningServer(one, one.url_when_ready(60)) for one in started]


@pytest.mark.parametrize("name", ROUTERS)
def test_what_a_router_passes_is_what_the_server_answers(
    commands: Path, servers: list[RunningServer], name: str
) -> None:
    """Byte for byte; what it does not pass is an error of its own."""
    with routed(commands, name, servers, model=MODELS[name]) as url:
        for path, body, routers in PASSED:
            if body is not OF_ADAPTER and body is not None and "model" in body:
                body = {**body, "model": MODELS[name]}  # noqa: PLW2901
            found = call(url, path, body)
            if name in routers:
                direct = call(servers[0].url, path, body)
                assert (found.status, found.body) == (200, direct.body), (path, body)
            elif body is not OF_ADAPTER:
                assert 400 <= found.status < 500, (path, body, found.body)


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for name, router in ROUTERS.items() for policy in router.by_session],
)
def test_a_session_stays_on_its_server(
    commands: Path, servers: list[RunningServer], name: str, policy: tuple[str, ...]
) -> None:
    """Each in the header that the router reads; sessions use both servers."""
    used, body = Counter[int](), {**CHAT, "model": MODELS[name]}
    with routed(commands, name, servers, policy, MODELS[name]) as url:
        for number in range(12):
            headers = {ROUTERS[name].session_header: f"session-{number}"}
            parts = share(servers, lambda: chat(url, body, headers), 3)  # noqa: B023 (called here)
            assert sorted(parts) == [0, 3], (number, parts)
            used[parts.index(3)] += 1
            if name in ONLY_VLLM_S:
                ask = partial(call, url, "/invocations", LMI, headers=headers)
                assert share(servers, ask, 3, "/invocations") == parts
    assert set(used) == {0, 1}, used


@pytest.mark.parametrize("name", ROUTERS)
def test_an_adapter_stays_on_the_server_of_its_session(
    commands: Path, servers: list[RunningServer], name: str
) -> None:
    """The header has the name; an adapter that was removed there and came back is found there."""
    router = ROUTERS[name]
    headers = {router.session_header: "capitals"}
    with routed(commands, name, servers, router.by_session[0], MODELS[name]) as url:
        parts = share(servers, lambda: chat(url, OF_ADAPTER, headers), 4)
        assert sorted(parts) == [0, 4]
        holder = servers[parts.index(4)]
        source = call(holder.url, "/adapters/capitals").json()["src"]
        assert call(holder.url, "/adapters/capitals", method="DELETE").status == 200
        body = {"name": "capitals", "src": source}
        assert call(holder.url, "/adapters", body).status == 200
        assert share(servers, lambda: chat(url, OF_ADAPTER, headers), 4) == parts


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_server_that_ends_loses_no_request(
    commands: Path, servers: list[RunningServer], name: str, end: signal.Signals
) -> None:
    """Whole answers come from the other one; a drain lets streams end, and a kill cuts them."""
    answered: Counter[int] = Counter()
    body = {**CHAT, "model": MODELS[name]}
    is_over = threading.Event()

    def load(url: str) -> None:
        while not is_over.is_set():
            answered[chat(url, body, {}).status] += 1

    with routed(commands, name, servers, model=MODELS[name]) as url:
        threads = [threading.Thread(target=load, args=(url,)) for _ in range(LOAD_THREADS)]
        for thread in threads:
            thread.start()
        streams = [OpenStream(servers[0].url, "/invocations", {**LMI, "stream": True})]
        streams += [OpenStream(url, CHATS, {**body, "stream": True})]
        servers[0].process.process.send_signal(end)
        ends = [stream.rest() for stream in streams]
        assert wait_until(lambda: answered.total() > 400, 60)
        is_over.set()
        for thread in threads:
            thread.join()
    assert set(answered) == {200}, answered
    if end is signal.SIGTERM:
        assert b"generated_text" in ends[0]
        assert ends[1].endswith(b"data: [DONE]\n\n")
