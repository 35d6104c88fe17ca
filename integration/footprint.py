"""What a server holds at rest, to be compared before and after: nothing may have grown."""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from integration.conftest import ServerProcess

LEAK_SHARE: Final = 1.05  # resident memory after a run, against after its warm-up
REST_SECONDS: Final = 4.0  # idle connections are closed, aborted requests forgotten


@dataclass(frozen=True)
class Footprint:
    """Open descriptors, event-loop tasks, requests in the front end and the engine, memory."""

    descriptors: int
    tasks: int
    requests: int
    resident_bytes: int
    kinds: Counter[str] = field(default_factory=Counter)  # of descriptors

    def leaks_since(self, before: "Footprint") -> list[str]:
        """Return what has grown."""
        found = []
        for name in ("descriptors", "tasks", "requests"):
            old, new = getattr(before, name), getattr(self, name)
            if new > old:
                kinds = dict(self.kinds - before.kinds) if name == "descriptors" else ""
                found.append(f"leaked {name}: {old} -> {new} {kinds}".strip())
        if self.resident_bytes > before.resident_bytes * LEAK_SHARE:
            found.append(f"leaked memory: {before.resident_bytes} -> {self.resident_bytes} bytes")
        return found

    def __str__(self) -> str:
        """The numbers on one line."""
        return (
            f"{self.descriptors} descriptors, {self.tasks} tasks, {self.requests} requests, "
            f"{self.resident_bytes / 2**20:.0f} MiB"
        )


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
    return Footprint(
        process.num_fds(),
        int(numbers["lmi_asyncio_tasks"]),
        int(sum(numbers[name] for name in names)),
        process.memory_info().rss,
        kinds_of_descriptors(process),
    )


def kinds_of_descriptors(process: psutil.Process) -> Counter[str]:
    """Return how many descriptors there are of each kind; connections by their state."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(link.readlink())
            kinds[name.split(":[", maxsplit=1)[0]] += 1
    for connection in process.net_connections("inet"):
        peer = connection.raddr.port if connection.raddr else ""
        kinds[f"{connection.status} {connection.laddr.port} {peer}"] += 1
    return kinds
