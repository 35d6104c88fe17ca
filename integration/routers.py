"""Routers of language models in front of two servers: vllm-router, sglang-router and smg, of PyPI.

What each passes on and keeps together is what docs/routers.md says of it. On the scripted engine: a
router sees routes, lists of models, health and cut connections, and no tokens.
"""

import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

import pytest

from integration.client import Answer, OpenStream, call, wait_until
from integration.conftest import SCRIPTED, TEN_TOKENS_A_SECOND, RunningServer, StartServer
from integration.environments import environment
from integration.fleet.proxies import free_ports

ROOT = Path(__file__).parent.parent
COMMON = ("--health-check-interval-secs", "1")
LOAD_THREADS = 4


@dataclass(frozen=True, slots=True)
class Router:
    """How it is started, and the header by which it keeps the requests of a session together."""

    words: tuple[str, ...]
    sticky: tuple[str, ...]  # the policy for that
    session_header: str
    model: str = "lmi"  # in requests


ROUTERS: Final[Mapping[str, Router]] = MappingProxyType({
    "vllm-router": Router(("vllm-router",), ("--policy", "consistent_hash"), "x-session-id"),
    "sglang-router": Router(("sglang-router", "launch"), (), ""),
    "smg": Router(
        ("python", "-m", "smg", "launch"), ("--policy", "consistent_hashing"), "x-smg-routing-key",
        "capitals",  # the first of the scripted engine's list, which has adapters only
    ),
})  # fmt: skip
CHAT: Final = {"model": "lmi", "messages": [{"role": "user", "content": "The sea is wide"}]}
OF_ADAPTER: Final = {**CHAT, "model": "capitals"}
LMI: Final = {"inputs": "The sea is wide", "parameters": {"max_new_tokens": 4}}
ALL: Final = frozenset(ROUTERS)
ONLY_VLLM_S: Final = frozenset({"vllm-router"})
# The route, the body, and the routers that pass it on: the others answer it themselves.
PASSED: Final = (
    ("/v1/chat/completions", CHAT, ALL),
    ("/v1/chat/completions", {**CHAT, "stream": True}, ALL),
    ("/v1/completions", {"model": "lmi", "prompt": "The sea"}, ALL),
    ("/v1/chat/completions", OF_ADAPTER, ALL - {"smg"}),  # it knows the first model of a list
    ("/v1/completions", {"model": "lmi", "prompt": [1, 2]}, ONLY_VLLM_S),
    ("/invocations", LMI, ONLY_VLLM_S),
    ("/invocations", {**LMI, "stream": True}, ONLY_VLLM_S),
    ("/adapters", None, ONLY_VLLM_S),
    ("/ping", None, ONLY_VLLM_S),
)


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder of the routers' commands."""
    return environment(ROOT / ".venv-routers", ROOT / "integration" / "routers.txt").parent


@pytest.fixture
def servers(server_process: StartServer) -> list[RunningServer]:
    """Two ready servers, ten tokens a second."""
    started = [
        server_process(*SCRIPTED, "--port", "0", environ=TEN_TOKENS_A_SECOND) for _ in range(2)
    ]
    return [RunningServer(one, one.url_when_ready(60)) for one in started]


@contextmanager
def routed(
    commands: Path,
    name: str,
    servers: Sequence[RunningServer],
    policy: Sequence[str] = ("--policy", "round_robin"),
) -> Iterator[str]:
    """Run a router over the servers; yields its URL once it has found both."""
    router, (port, figures) = ROUTERS[name], free_ports(2)
    command = [
        str(commands / router.words[0]), *router.words[1:], *COMMON, *policy,
        "--worker-urls", *(server.url for server in servers),
        "--port", str(port), "--prometheus-port", str(figures),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert wait_until(lambda: is_routing(url, router, servers), 60), name
            yield url
        finally:
            process.kill()


def is_routing(url: str, router: Router, servers: Sequence[RunningServer]) -> bool:
    """Return whether requests, each of a session of its own, have reached both servers."""
    headers = {router.session_header: uuid4().hex} if router.session_header else {}
    try:
        return chat(url, {**CHAT, "model": router.model}, headers).status == 200 and all(
            map(chats, servers)
        )
    except OSError:
        return False


def chats(server: RunningServer) -> int:
    """Return how many chats the server has answered."""
    text = call(server.url, "/metrics").body.decode()
    found = re.findall(r"^lmi_requests_total{.*chat/completions.* (\S+)$", text, re.MULTILINE)
    return int(sum(map(float, found)))


def share(servers: Sequence[RunningServer], ask: Callable[[], Answer], times: int) -> list[int]:
    """Return how many of some requests each server gets; all are answered."""
    before = [chats(server) for server in servers]
    assert [ask().status for _ in range(times)] == [200] * times
    return [chats(server) - known for server, known in zip(servers, before, strict=True)]


@pytest.mark.parametrize("name", ROUTERS)
def test_what_a_router_passes_is_what_the_server_answers(
    commands: Path, servers: list[RunningServer], name: str
) -> None:
    """Byte for byte; what it does not pass is an error of its own."""
    with routed(commands, name, servers) as url:
        for path, body, routers in PASSED:
            if body is not OF_ADAPTER and body is not None and "model" in body:
                body = {**body, "model": ROUTERS[name].model}  # noqa: PLW2901
            found = call(url, path, body)
            if name in routers:
                direct = call(servers[0].url, path, body)
                assert (found.status, found.body) == (200, direct.body), (path, body)
            elif body is not OF_ADAPTER:
                assert 400 <= found.status < 500, (path, body, found.body)


@pytest.mark.parametrize("name", [name for name in ROUTERS if ROUTERS[name].session_header])
def test_a_session_stays_on_its_server(
    commands: Path, servers: list[RunningServer], name: str
) -> None:
    """Each in the header that the router reads; sessions use both servers."""
    router, used = ROUTERS[name], Counter[int]()
    body = {**CHAT, "model": router.model}
    with routed(commands, name, servers, router.sticky) as url:
        for number in range(12):
            headers = {router.session_header: f"session-{number}"}
            parts = share(servers, lambda: chat(url, body, headers), 3)  # noqa: B023 (called here)
            assert sorted(parts) == [0, 3], (number, parts)
            used[parts.index(3)] += 1
    assert set(used) == {0, 1}, used


def chat(url: str, body: Any, headers: Mapping[str, str]) -> Answer:
    """Ask for one chat."""
    return call(url, "/v1/chat/completions", body, headers=headers)


def test_an_adapter_stays_on_the_server_of_its_session(
    commands: Path, servers: list[RunningServer]
) -> None:
    """The header has the name; an adapter that was removed there and came back is found there."""
    headers = {ROUTERS["vllm-router"].session_header: "capitals"}
    with routed(commands, "vllm-router", servers, ROUTERS["vllm-router"].sticky) as url:
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
    body = {**CHAT, "model": ROUTERS[name].model}
    is_over = threading.Event()

    def load(url: str) -> None:
        while not is_over.is_set():
            answered[chat(url, body, {}).status] += 1

    with routed(commands, name, servers) as url:
        threads = [threading.Thread(target=load, args=(url,)) for _ in range(LOAD_THREADS)]
        for thread in threads:
            thread.start()
        streams = [OpenStream(servers[0].url, "/invocations", {**LMI, "stream": True})]
        streams += [OpenStream(url, "/v1/chat/completions", {**body, "stream": True})]
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
