"""What the kernel takes for a row on each of many connections: bare sockets, no HTTP, no engine.

One write a row of one connection is the least that any server spends on a streamed token. The
writes of a step come in a row, to readers that are asleep, as those of a real server do.

A second process can stand between the two and hand each row on, on the event loop that the server
uses and without looking at it: the least that another front end behind ours would cost on top.

    python -m integration.bench.send_floor              (reads `STREAMS ROWS STEP_MS` from stdin)
    python -m integration.bench.send_floor PORT         (relays to that port)
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import uvloop

from integration.bench.cpu_time import cpu_seconds
from integration.bench.servers import stop

ROW: Final = b'2d\r\n{"index":0,"token":{"id":273,"text":" a"}}\n\r\n'


def serve() -> None:
    """Write to the connections of each line that is read, then close them."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        print(server.getsockname()[1], flush=True)
        for line in sys.stdin:
            streams, rows, step_ms = (int(word) for word in line.split())
            clients = [server.accept()[0] for _ in range(streams)]
            for client in clients:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rows):
                for client in clients:
                    client.send(ROW)
                time.sleep(step_ms / 1e3)
            for client in clients:
                client.close()


class _Relayed(asyncio.Protocol):
    """One end of a relayed connection."""

    def __init__(self, other: asyncio.Transport | None = None) -> None:
        self.other = other

    def data_received(self, data: bytes) -> None:
        """Hand it on."""
        assert self.other is not None
        self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side, after what it still has to write."""
        if self.other is not None:
            self.other.close()


async def relay(port: int) -> None:
    """Hand on what comes from `port` to each client."""
    loop = asyncio.get_running_loop()

    class Client(_Relayed):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.connecting = loop.create_task(self.connect(transport))

        async def connect(self, transport: Any) -> None:
            self.other, _ = await loop.create_connection(
                lambda: _Relayed(transport), "127.0.0.1", port
            )

    server = await loop.create_server(Client, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class SendFloor:
    """The process that writes, and one that may stand before it."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self._process = process
        self.port = port

    def cost(self, streams: int, rows: int, step_ms: int) -> tuple[float, float]:
        """Return its CPU microseconds per row, and 1 token in each."""
        return self._cost(self._process.pid, self.port, (streams, rows, step_ms))

    def relay_cost(
        self, relay: "subprocess.Popen[str]", port: int, streams: int, rows: int, step_ms: int
    ) -> tuple[float, float]:
        """Return the CPU microseconds of the relay at `port` per row, and 1 token in each."""
        return self._cost(relay.pid, port, (streams, rows, step_ms))

    def _cost(self, pid: int, port: int, size: tuple[int, int, int]) -> tuple[float, float]:
        before = cpu_seconds(pid)
        asyncio.run(self._read(port, *size))
        streams, rows, _ = size
        return (cpu_seconds(pid) - before) / (streams * rows) * 1e6, 1.0

    async def _read(self, port: int, streams: int, rows: int, step_ms: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{streams} {rows} {step_ms}\n")
        self._process.stdin.flush()

        async def one() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = await reader.read(-1)
            writer.close()
            if len(found) != rows * len(ROW):
                raise AssertionError(found[-100:])

        await asyncio.gather(*(one() for _ in range(streams)))


@contextmanager
def _process(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Start a process of this module; yields it and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "integration.bench.send_floor", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        stop(process)  # type: ignore[arg-type]


@contextmanager
def send_floor() -> Iterator[SendFloor]:
    """Start it, and end it."""
    with _process() as (process, port):
        yield SendFloor(process, port)


@contextmanager
def relay_floor(sender: SendFloor) -> Iterator[Callable[[int, int, int], tuple[float, float]]]:
    """Start a relay before `sender`; yields what measures it, as `SendFloor.cost` does."""
    with _process(str(sender.port)) as (process, port):
        yield partial(sender.relay_cost, process, port)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvloop.run(relay(int(sys.argv[1])))
    else:
        serve()
