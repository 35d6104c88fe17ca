"""What a server holds at rest, to be compared before and after: nothing may have grown."""

import asyncio
import contextlib
import os
import re
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from integration.conftest import ServerProcess

LEAK_SHARE: Final = 1.05  # resident memory after a run, against after its warm-up
POOL: Final = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio starts as it needs them
REST_SECONDS: Final = 4.0  # idle connections are closed, aborted requests forgotten
SETTLED_SECONDS: Final = 30.0
CLOSING_SECONDS: Final = 0.5  # the connection that asked is closed after its answer was read


@dataclass(frozen=True)
class Footprint:
    """Open descriptors, event-loop tasks, threads, requests in front end and engine, memory.

    The memory of the engine's processes is a figure only: after a restart they are other ones.
    """

    descriptors: int
    tasks: int
    threads: int
    requests: int
    resident_bytes: int
    engine_bytes: int
    kinds: Counter[str] = field(default_factory=Counter)  # of descriptors
    holders: Counter[str] = field(default_factory=Counter)  # of requests, by the series

    def leaks_since(self, before: "Footprint") -> list[str]:
        """Return what has grown."""
        found = []
        for name in ("descriptors", "tasks", "requests"):
            old, new = getattr(before, name), getattr(self, name)
            if new > old:
                kinds: object = ""
                if name == "descriptors":
                    kinds = dict(self.kinds - before.kinds)
                elif name == "requests":
                    kinds = dict(self.holders)
                found.append(f"leaked {name}: {old} -> {new} {kinds}".strip())
        if self.threads > before.threads + POOL:
            found.append(f"leaked threads: {before.threads} -> {self.threads}")
        if self.resident_bytes > before.resident_bytes * LEAK_SHARE:
            found.append(f"leaked memory: {before.resident_bytes} -> {self.resident_bytes} bytes")
        return found

    def __str__(self) -> str:
        """The numbers on one line."""
        return (
            f"{self.descriptors} descriptors, {self.tasks} tasks, {self.threads} threads, "
            f"{self.requests} requests, {self.resident_bytes / 2**20:.0f} MiB, "
            f"the engine {self.engine_bytes / 2**20:.0f} MiB"
        )


async def settled(
    session: aiohttp.ClientSession, server: ServerProcess, before: Footprint
) -> Footprint:
    """Return what the server holds, once nothing has grown since `before` or time is up.

    On a busy machine a task may end some seconds late; one that leaked never does.
    """
    until = time.monotonic() + SETTLED_SECONDS
    while (found := await measure(session, server)).leaks_since(before):
        if time.monotonic() > until:
            break
    return found


async def measure(session: aiohttp.ClientSession, server: ServerProcess) -> Footprint:
    """Return what the server holds once it has come to rest; `session` is left without use."""
    await asyncio.sleep(REST_SECONDS)
    numbers: dict[str, float] = {}
    async with session.get("/metrics", headers={"Connection": "close"}) as response:
        for line in (await response.text()).splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                key = name.split("{")[0]
                numbers[key] = numbers.get(key, 0.0) + float(value)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "lmi_requests_in_flight")
    process = psutil.Process(server.process.pid)
    await asyncio.sleep(CLOSING_SECONDS)
    kinds = kinds_of_descriptors(process)
    return Footprint(
        kinds.total(),
        int(numbers["lmi_asyncio_tasks"]),
        process.num_threads(),
        int(sum(numbers[name] for name in names)),
        process.memory_info().rss,
        sum(child.memory_info().rss for child in process.children(recursive=True)),
        kinds,
        Counter({name: int(numbers[name]) for name in names if numbers[name]}),
    )


def kinds_of_descriptors(process: psutil.Process) -> Counter[str]:
    """Return how many descriptors there are of each kind, without what differs at each run."""
    sockets = {}  # what each is; those neither bound nor connected are in no table
    for connection in process.net_connections("all"):
        if connection.fd >= 0:
            sockets[connection.fd] = _describe(connection)
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(link.readlink()).split(":[", maxsplit=1)[0]
            kinds[sockets.get(int(link.name), re.sub(r"(?<=-)\w{8}(?=/)", "*", name))] += 1
    return kinds


def _describe(connection: Any) -> str:
    if connection.family == socket.AF_UNIX:
        path = str(connection.laddr)
        return f"unix socket {Path(path).parent if path else 'without a name'}"
    peer = connection.raddr.port if connection.raddr else ""
    return f"{connection.status} {connection.laddr.port} {peer}"
