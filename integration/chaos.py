"""Chaos: everything that can go wrong at once, and every request still gets a definite end.

Clients of all dialects ask, disconnect, send invalid input, read slowly and come in bursts;
adapters come and go; the engine is killed. At the end nothing may be lost, crossed or leaked.

    python -m integration.chaos --seconds 600
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from integration.adapters_support import (
    SINGLE_THREAD,
    StormClient,
    Texts,
    request_of,
    texts_of_answer,
    write_weights,
)
from integration.conftest import ServerProcess, StartServer, start_server
from integration.footprint import Footprint, measure, settled
from integration.processes_of_a_server import is_of_the_front

CLIENTS = 16
LIMIT = 24  # job_queue_size: bursts must meet it
MAX_BODY = 1 << 20
LONGEST_ANSWER_SECONDS = 90.0
STATIC = ("", "capitals", "json")  # "" is the base model
TENANTS = ("tenant-0", "tenant-1", "tenant-2")
OPTIONS = {
    "OPTION_MAX_CPU_LORAS": "4",
    "SERVING_JOB_QUEUE_SIZE": str(LIMIT),
    "SERVING_MAX_REQUEST_SIZE": str(MAX_BODY),
    "SERVING_RETRY_THRESHOLD": "100000",
    **SINGLE_THREAD,
}


@dataclass
class Chaos:
    """What the clients share, and what they found."""

    url: str
    session: aiohttp.ClientSession
    expected: dict[str, Texts]
    folder: Path
    rng: Random
    until: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    crossed: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.until

    async def exchange(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and bytes of a whole answer; (0, b"") and a loss where none came."""
        data: Any = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json"} | (headers or {})
        self.counts["sent"] += 1
        try:
            sent = io.BytesIO(data) if len(data) >= MAX_BODY else data  # as aiohttp wants it
            async with self.session.post(path, data=sent, headers=all_headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.lost.append(f"{path} {data[:80]!r}: {type(error).__name__} {error}")
            return 0, b""
        self.counts["answered" if response.status == 200 else f"refused {response.status}"] += 1
        return response.status, raw


async def ask(chaos: Chaos) -> None:
    """Ask an adapter or the base in some way; a 200 must be that one's answer, to its end."""
    name = chaos.rng.choice((*STATIC, *TENANTS))
    way = chaos.rng.choice(StormClient.WAYS)
    prompt = chaos.rng.choice(StormClient.PROMPTS)
    status, raw = await chaos.exchange(*request_of([name], prompt, way))
    if status != 200:
        return
    if way == "stream" and b'"error"' in raw.splitlines()[-1]:
        chaos.counts["ended by an error row"] += 1
        return
    (text,) = texts_of_answer(raw, way)
    key = key_of(prompt, way)
    chaos.counts["compared"] += 1
    if text != chaos.expected[name][key]:
        chaos.crossed.append(f"{name or 'base'} {way} {prompt[:30]!r}: {text!r}")


def key_of(prompt: str, way: str) -> str:
    """Return under which key `StormClient.texts_of` keeps the answer."""
    lane = way if way in ("completions", "chat-header") else "lmi"
    return f"{lane}:{StormClient.PROMPTS.index(prompt)}"


async def stream_openai(chaos: Chaos) -> None:
    """Stream by the OpenAI routes: whatever happens, the stream ends with its end mark."""
    body: dict[str, Any] = {"max_tokens": 30, "stream": True, "temperature": 0.7}
    if chaos.rng.random() < 0.5:
        path, body = "/v1/completions", body | {"prompt": "The sea"}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "Say something."}]}
    status, raw = await chaos.exchange(path, body)
    if status == 200 and not raw.endswith(b"data: [DONE]\n\n"):
        chaos.lost.append(f"{path}: the stream has no end: {raw[-80:]!r}")


async def disconnect_client(chaos: Chaos) -> None:
    """Go away before, while or after the first bytes come."""
    body = {
        "inputs": "Once upon a time",
        "parameters": {"max_new_tokens": 400, "ignore_eos_token": True},
        "stream": chaos.rng.random() < 0.5,
    }
    chaos.counts["hung up"] += 1
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        timeout = aiohttp.ClientTimeout(total=chaos.rng.uniform(0.01, 1.5))
        async with chaos.session.post("/invocations", json=body, timeout=timeout) as response:
            await response.content.read(1)
            response.close()


async def read_slowly(chaos: Chaos) -> None:
    """Read a stream in small pieces with pauses; it still comes whole."""
    body = {"inputs": "The sea", "parameters": {"max_new_tokens": 100}, "stream": True}
    chaos.counts["sent"] += 1
    raw = b""
    try:
        async with chaos.session.post("/invocations", json=body) as response:
            while piece := await response.content.read(256):
                raw += piece
                await asyncio.sleep(chaos.rng.uniform(0, 0.05))
    except (aiohttp.ClientError, TimeoutError) as error:
        chaos.lost.append(f"slow reader: {type(error).__name__} {error}")
        return
    chaos.counts["read slowly" if response.status == 200 else f"refused {response.status}"] += 1
    last = raw.splitlines()[-1]
    if response.status == 200 and b'"generated_text"' not in last and b'"error"' not in last:
        chaos.lost.append(f"slow reader: the stream has no end: {raw[-80:]!r}")


async def send_invalid_input(chaos: Chaos) -> None:
    """Send what is no request; it is refused, by a status below 500 but for a busy server."""
    rng = chaos.rng
    bodies: tuple[Any, ...] = (
        rng.randbytes(rng.randrange(1, 400)),
        b"{" * 2000,
        b'{"inputs": ' + b"[" * 5000,
        {"inputs": rng.choice((None, 5, {}, [], [[]], ""))},
        {"inputs": "a", "parameters": {"max_new_tokens": rng.choice((-1, "x", 1e9, None, []))}},
        {"inputs": "a", "parameters": {"temperature": rng.choice((-1, "hot", 1e400))}},
        {"prompt": rng.choice((None, 5, {}))},
        {"messages": rng.choice((None, "x", [1], [{}], [{"role": "user"}]))},
        {"inputs": "a", "adapters": rng.choice((5, {}, "nobody", ["x"]))},
    )
    path = rng.choice(("/invocations", "/v1/completions", "/v1/chat/completions", "/predictions/x"))
    status, raw = await chaos.exchange(path, rng.choice(bodies))
    if status == 500 and b"Inference Engine Failure" not in raw:
        chaos.lost.append(f"invalid input got 500: {raw[:200]!r}")


async def send_too_much(chaos: Chaos) -> None:
    """Send a body over the limit."""
    status, _ = await chaos.exchange("/invocations", b'{"inputs": "' + b"a" * MAX_BODY + b'"}')
    if status not in (0, 413, 503):
        chaos.lost.append(f"too large a body got {status}")


async def send_noise(chaos: Chaos) -> None:
    """Open a socket, send bytes that are no HTTP, or half a request, and leave."""
    parts = urlsplit(chaos.url)
    noise = (
        chaos.rng.randbytes(200),
        b"POST /invocations HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /invocations HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"",
    )
    chaos.counts["noise"] += 1
    with contextlib.suppress(OSError, TimeoutError):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(chaos.rng.choice(noise))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), chaos.rng.uniform(0, 0.5))
        writer.close()
        await writer.wait_closed()


async def burst(chaos: Chaos) -> None:
    """Send more at once than the queue takes."""
    body = {"inputs": "The moon", "parameters": {"max_new_tokens": 5}}
    async with asyncio.TaskGroup() as group:
        for _ in range(LIMIT * 2):
            group.create_task(chaos.exchange("/invocations", body))


ACTIONS: tuple[tuple[int, Callable[[Chaos], Awaitable[None]]], ...] = (
    (45, ask),
    (10, stream_openai),
    (15, disconnect_client),
    (4, read_slowly),
    (15, send_invalid_input),
    (3, send_too_much),
    (6, send_noise),
    (2, burst),
)


async def act(chaos: Chaos) -> None:
    """Do something, again and again."""
    weights = [weight for weight, _ in ACTIONS]
    actions = [action for _, action in ACTIONS]
    while chaos.goes_on:
        (action,) = chaos.rng.choices(actions, weights)
        await action(chaos)
        await asyncio.sleep(chaos.rng.uniform(0, 0.05))


async def churn(chaos: Chaos, name: str) -> None:
    """Register and remove one adapter, always with the same weights."""
    query = {"name": name, "src": str(chaos.folder / name)}
    while chaos.goes_on:
        for method, path, params in (
            ("POST", "/adapters", query),
            ("DELETE", f"/adapters/{name}", {}),
        ):
            chaos.counts["sent"] += 1
            try:
                async with chaos.session.request(method, path, params=params) as response:
                    await response.read()
                chaos.counts[f"{method} adapter {response.status}"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                chaos.lost.append(f"{method} {path}: {type(error).__name__} {error}")
            await asyncio.sleep(chaos.rng.uniform(0.1, 1.0))


async def kill_engines(chaos: Chaos, server: ServerProcess, every_seconds: float) -> None:
    """Kill the engine now and then, and wait until it is back."""
    while chaos.until - time.monotonic() > every_seconds:
        await asyncio.sleep(every_seconds)
        for child in server.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                # A front end that dies takes its connections with it: that is another test's.
                if not is_of_the_front(child):
                    child.kill()
        chaos.counts["engine kills"] += 1
        await wait_ready(chaos, server)


async def wait_ready(chaos: Chaos, server: ServerProcess) -> None:
    """Return once /ping is 200; it must answer all the time."""
    for _ in range(1200):
        async with chaos.session.get("/ping", timeout=aiohttp.ClientTimeout(total=20)) as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.1)
    raise AssertionError(server.describe())


async def at_rest(chaos: Chaos, server: ServerProcess) -> Footprint:
    """Return what the server holds once its engine is back and all is quiet."""
    await wait_ready(chaos, server)
    return await measure(chaos.session, server)


async def rage(chaos: Chaos, server: ServerProcess, seconds: float, kill_seconds: float) -> None:
    """Let everything loose for so long."""
    chaos.until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(act(chaos))
        for name in TENANTS:
            group.create_task(churn(chaos, name))
        group.create_task(kill_engines(chaos, server, kill_seconds))


async def learn(chaos: Chaos) -> None:
    """Note what each adapter and the base answer alone; no two may answer alike."""
    client = StormClient(chaos.session)
    seeds = itertools.count(1)
    for name in STATIC:
        chaos.expected[name] = await client.texts_of(name or None)
    for name in TENANTS:
        while name not in chaos.expected:
            source = write_weights(chaos.folder / name, seed=next(seeds))
            await client.manage("POST", "/adapters", {"name": name, "src": str(source)})
            texts = await client.texts_of(name)
            await client.manage("DELETE", f"/adapters/{name}", {})
            if all(texts[key] != other[key] for other in chaos.expected.values() for key in texts):
                chaos.expected[name] = texts
            else:
                shutil.rmtree(source)


@dataclass
class Outcome:
    """What a run showed."""

    chaos: Chaos
    before: Footprint
    after: Footprint

    @property
    def faults(self) -> list[str]:
        """Everything that must not be."""
        found = [f"lost: {item}" for item in self.chaos.lost]
        found += [f"crossed: {item}" for item in self.chaos.crossed]
        found += self.after.leaks_since(self.before)
        return found

    def report(self) -> str:
        """The numbers, and what went wrong."""
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(self.chaos.counts.items()))
        growth = self.after.resident_bytes / self.before.resident_bytes - 1
        lines = [
            counts,
            f"lost: {len(self.chaos.lost)}, crossings: {len(self.chaos.crossed)}",
            f"before: {self.before}",
            f"after:  {self.after} ({growth:+.1%} memory)",
            *self.faults[:20],
        ]
        return "\n".join(lines)


async def run(
    server: ServerProcess, url: str, seconds: float, kill_seconds: float, seed: int
) -> Outcome:
    """Warm up for a quarter of the time, measure, rage for the rest, measure again."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    timeout = aiohttp.ClientTimeout(total=LONGEST_ANSWER_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            chaos = Chaos(url, session, {}, folder, Random(seed))
            await learn(chaos)
            await rage(chaos, server, seconds / 4, kill_seconds)
            before = await at_rest(chaos, server)
            await rage(chaos, server, seconds * 3 / 4, kill_seconds)
            await wait_ready(chaos, server)
            return Outcome(chaos, before, await settled(session, server, before))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(
    start_one: Callable[..., ServerProcess], front_ends: int = 1
) -> tuple[ServerProcess, str]:
    """Return a ready server that restarts its engine as often as it takes."""
    environ = {**OPTIONS, "LMI_FRONTEND_PROCESSES": str(front_ends)}
    server = start_one("--demo", "--port", "0", environ=environ)
    return server, server.url_when_ready()


@pytest.mark.vllm
def test_chaos_loses_no_request(server_process: StartServer) -> None:
    """A short run: two engine kills, nothing lost or crossed, no request or task left."""
    server, url = start(partial(server_process, is_forked=True))
    seed = int(time.time())
    outcome = asyncio.run(run(server, url, 40, 8, seed))
    print(f"seed {seed}\n{outcome.report()}")
    # So short a run says nothing of memory.
    assert not [fault for fault in outcome.faults if "memory" not in fault], server.describe()
    assert outcome.chaos.counts["engine kills"] >= 2
    assert outcome.chaos.counts["compared"] > 40


def main() -> int:
    """Run from the command line; exit code 1 after any fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kill-seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--front-ends", type=int, default=1, help="LMI_FRONTEND_PROCESSES")
    given = parser.parse_args()
    server, url = start(
        lambda *words, **more: start_server(Path(tempfile.gettempdir()), *words, **more),
        given.front_ends,
    )
    try:
        outcome = asyncio.run(run(server, url, given.seconds, given.kill_seconds, given.seed))
    finally:
        server.kill()
    print(f"seed {given.seed}, {given.seconds:g} s\n{outcome.report()}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
