"""What the relay of a Ray Serve replica costs: time to the first token, and CPU of a token.

`python -m integration.bench.ray_relay` runs the relay in this process, without Ray, and a server on
a Unix socket. What Ray's proxy and its calls cost is Ray's, and not in these figures.

- First token: requests by the relay and, in turn, by a bare connection that writes the same bytes
  and waits for the first row. The scripted engine answers, whose own time varies little.
- CPU: streams of the embedded model by the relay alone; the CPU of this process beside that of the
  server with its engine.
"""

import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

from integration.conftest import ServerProcess, start_server
from lmi_vllm.features.ray_serve.relay import Message, Relay

REQUESTS: Final = 400
STREAMS, TOKENS, ROUNDS = 32, 200, 4
ROUTE: Final = "/invocations"
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"


def scope_of(body: bytes) -> dict[str, Any]:
    """Return the ASGI scope of the request."""
    return {
        "type": "http", "method": "POST", "path": ROUTE, "raw_path": ROUTE.encode(),
        "query_string": b"", "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()), (b"user-agent", b"bench"),
        ],
    }  # fmt: skip


async def by_relay(relay: Relay, body: bytes) -> tuple[float, int]:
    """Return the seconds until the first row, and the rows."""
    began, first, rows, is_sent = time.perf_counter(), 0.0, 0, False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal first, rows
        if piece := message.get("body"):
            first = first or time.perf_counter() - began
            rows += piece.count(b"\n")

    await relay(scope_of(body), receive, send)
    return first, rows


class BareConnection(asyncio.Protocol):
    """Writes a request and notes when the first row is there and when all are."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport: Any = transport

    def ask(self, request: bytes) -> "asyncio.Future[float]":
        """Return the seconds until the first row, once the answer is whole."""
        self._began, self._first, self._tail = time.perf_counter(), 0.0, b""
        self._done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        """Note the first row, and the end of the answer."""
        if not self._first and b'{"index"' in data:
            self._first = time.perf_counter() - self._began
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK:
            self._done.set_result(self._first)


def request_bytes(body: bytes) -> bytes:
    """Return the same request on the wire."""
    lines = [f"POST {ROUTE} HTTP/1.1".encode()]
    lines += [name + b": " + value for name, value in scope_of(body)["headers"]]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def first_tokens(socket: str) -> tuple[list[float], list[float]]:
    """Return milliseconds until the first row, by the relay and bare, in turn."""
    body = json.dumps(
        {"inputs": "The sea", "parameters": {"max_new_tokens": 4}, "stream": True}
    ).encode()
    relay, (_, bare) = (
        Relay(socket),
        await asyncio.get_running_loop().create_unix_connection(BareConnection, socket),
    )
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(REQUESTS):
        found[0].append((await by_relay(relay, body))[0] * 1000)
        found[1].append(await bare.ask(request_bytes(body)) * 1000)
    bare.transport.close()
    await relay.close()
    return found


def cpu_seconds(server: ServerProcess) -> float:
    """Return the CPU time of a server and its engine."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def cpu_of_tokens(socket: str, server: ServerProcess) -> list[tuple[float, float]]:
    """Return microseconds of a token for each round: the relay's, and the server's."""
    parameters = {"max_new_tokens": TOKENS, "ignore_eos_token": True}
    body = json.dumps({"inputs": "The sea", "parameters": parameters, "stream": True}).encode()
    relay, found = Relay(socket), []
    for _ in range(ROUNDS + 1):
        began, servers = time.process_time(), cpu_seconds(server)
        answers = await asyncio.gather(*(by_relay(relay, body) for _ in range(STREAMS)))
        tokens = sum(rows for _, rows in answers)
        assert tokens == STREAMS * TOKENS
        ours, theirs = time.process_time() - began, cpu_seconds(server) - servers
        found.append((ours * 1e6 / tokens, theirs * 1e6 / tokens))
    await relay.close()
    return found[1:]  # the first warms up


def main() -> None:
    """Print both figures."""
    with (
        tempfile.TemporaryDirectory(prefix="lmi-bench-", dir="/tmp") as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        print("load:", os.getloadavg())
        for words in (("--engine", "scripted"), ()):
            socket = f"{name}/{len(words)}.sock"
            server = start_server(Path(name), "--demo", *words, "--uds", socket)
            try:
                server.wait_ready()
                if words:
                    relayed, bare = runner.run(first_tokens(socket))
                    middle = statistics.median(relayed), statistics.median(bare)
                    print(f"first token, ms, p50: relay {middle[0]:.3f}, bare {middle[1]:.3f}")
                    print(f"difference at p50: {middle[0] - middle[1]:.3f}")
                else:
                    rounds = runner.run(cpu_of_tokens(socket, server))
                    ours, theirs = (statistics.median(part) for part in zip(*rounds, strict=True))
                    print(f"CPU of a token, us: relay {ours:.1f}, server and engine {theirs:.1f}")
                    print(f"share: {ours / theirs:.1%}")
            finally:
                server.kill()
        print("load:", os.getloadavg())


if __name__ == "__main__":
    main()
