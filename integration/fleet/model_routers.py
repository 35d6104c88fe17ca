"""Routers of language models, of PyPI, over running servers, and who of these got a request."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import uuid4

from integration.client import Answer, call, send, wait_until
from integration.conftest import RunningServer
from integration.environments import environment
from integration.fleet.proxies import free_ports

ROOT: Final = Path(__file__).parents[2]
COMMON: Final = ("--health-check-interval-secs", "1")


@dataclass(frozen=True, slots=True)
class Router:
    """How it is started, and how it keeps the requests of a session or of a prefix together."""

    words: tuple[str, ...]
    session_header: str
    by_session: tuple[tuple[str, ...], ...]  # the policies that read the header
    by_prefix: tuple[tuple[str, ...], ...]


_CACHE_AWARE: Final = ("--policy", "cache_aware")
ROUTERS: Final[Mapping[str, Router]] = MappingProxyType({
    "vllm-router": Router(
        ("vllm-router",), "x-session-id", (("--policy", "consistent_hash"),), (_CACHE_AWARE,)
    ),
    "sglang-router": Router(
        ("sglang-router", "launch"), "x-smg-routing-key",
        (("--policy", "manual", "--assignment-mode", "min_group"),), (_CACHE_AWARE,),
    ),
    "smg": Router(
        ("python", "-m", "smg", "launch"), "x-smg-routing-key",
        (("--policy", "consistent_hashing"), ("--policy", "round_robin", "--sticky-sessions")),
        (_CACHE_AWARE, ("--policy", "prefix_hash")),
    ),
})  # fmt: skip
CHATS: Final = "/v1/chat/completions"
CHAT: Final = {"model": "lmi", "messages": [{"role": "user", "content": "The sea is wide"}]}


def router_commands() -> Path:
    """Return the folder of the routers' commands."""
    return environment(ROOT / ".venv-routers", ROOT / "integration" / "routers.txt").parent


@contextmanager
def routed(
    commands: Path,
    name: str,
    servers: Sequence[RunningServer],
    policy: Sequence[str] = ("--policy", "round_robin"),
    model: str = "lmi",
) -> Iterator[str]:
    """Run a router over the servers; yields its URL once it has found both.

    `model` is one that both serve, and the router knows.
    """
    router, (port, figures) = ROUTERS[name], free_ports(2)
    command = [
        str(commands / router.words[0]), *router.words[1:], *COMMON, *policy,
        "--worker-urls", *(server.url for server in servers),
        "--port", str(port), "--prometheus-port", str(figures),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            known = [asked(server) for server in servers]
            is_routing = partial(has_reached, url, router, model, servers, known)
            assert wait_until(is_routing, 60), name
            yield url
        finally:
            process.kill()


def has_reached(
    url: str, router: Router, model: str, servers: Sequence[RunningServer], known: Sequence[int]
) -> bool:
    """Ask two at a time, of sessions and prefixes of their own; whether both servers got some."""
    try:
        with contextlib.closing(send(url, CHATS, _unlike_any(model, stream=True))):
            headers = {router.session_header: uuid4().hex}
            status = chat(url, _unlike_any(model), headers).status
    except OSError:
        return False
    counts = [asked(server) - before for server, before in zip(servers, known, strict=True)]
    return status == 200 and min(counts) > 0


def _unlike_any(model: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": uuid4().hex * 8}]
    return {"model": model, "messages": messages, "max_tokens": 8, **more}


def asked(server: RunningServer, path: str = CHATS) -> int:
    """Return how many requests of a route the server has answered whole."""
    text = call(server.url, "/metrics").body.decode()
    pattern = rf'^lmi_requests_total{{.*route="{path}",status="200"}} (\S+)$'
    return int(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


def share(
    servers: Sequence[RunningServer], ask: Callable[[], Answer], times: int, path: str = CHATS
) -> list[int]:
    """Return how many of some requests each server gets; all are answered."""
    before = [asked(server, path) for server in servers]
    assert [ask().status for _ in range(times)] == [200] * times
    return [asked(server, path) - known for server, known in zip(servers, before, strict=True)]


def chat(url: str, body: Any, headers: Mapping[str, str]) -> Answer:
    """Ask for one chat."""
    return call(url, CHATS, body, headers=headers)
