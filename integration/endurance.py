"""Many requests, one after another and in bursts, leave the process as it was.

python -m integration.endurance --requests 20000

It measures after each tenth: slow growth shows before the end, and in a run that is cut short.
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from integration.conftest import ServerProcess, StartServer, running_server
from integration.footprint import Footprint, measure

BURST = 100
WARM_UP_TENTHS = 2
GREEDY = {"max_new_tokens": 2}
REQUESTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("/invocations", {"inputs": "The sea", "parameters": GREEDY}),
    ("/invocations", {"inputs": "The sea", "parameters": GREEDY, "stream": True}),
    ("/invocations", {"inputs": ["The sea", "The moon"], "parameters": GREEDY}),
    ("/invocations", {"inputs": "The sea", "parameters": GREEDY, "adapters": "json"}),
    ("/v1/completions", {"prompt": "The sea", "max_tokens": 2}),
    ("/v1/completions", {"prompt": "The sea", "max_tokens": 2, "stream": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True},
    ),
    ("/invocations", {"inputs": 5}),
)
REFUSED = len(REQUESTS) - 1  # the last is no request


async def send(session: aiohttp.ClientSession, number: int, counts: Counter[str]) -> None:
    """Send one request and read all of its answer."""
    path, body = REQUESTS[number % len(REQUESTS)]
    async with session.post(path, json=body) as response:
        raw = await response.read()
    expected = 424 if number % len(REQUESTS) == REFUSED else 200
    if response.status != expected or (b'"error"' in raw.splitlines()[-1] and expected == 200):
        raise AssertionError(f"{path} {body}: {response.status} {raw[:300]!r}")
    counts[f"{path} {response.status}"] += 1


async def send_all(
    session: aiohttp.ClientSession, total: int, counts: Counter[str], clients: int
) -> None:
    """Send half of the requests one after another from each client, half in bursts."""
    numbers = iter(range(total // 2))

    async def one_after_another() -> None:
        for number in numbers:
            await send(session, number, counts)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one_after_another())
    for first in range(total // 2, total, BURST):
        async with asyncio.TaskGroup() as group:
            for number in range(first, min(first + BURST, total)):
                group.create_task(send(session, number, counts))


async def endure(
    server: ServerProcess, url: str, total: int, clients: int = 1
) -> tuple[Counter[str], list[Footprint]]:
    """Return what was sent, and the footprint after each part of it; the first is a warm-up."""
    counts: Counter[str] = Counter()
    found = []
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        for share in (WARM_UP_TENTHS, *[1] * (10 - WARM_UP_TENTHS)):
            await send_all(session, total * share // 10, counts, clients)
            found.append(await measure(session, server))
            print(f"{counts.total()} requests: {found[-1]}", flush=True)
    return counts, found


@pytest.mark.vllm
def test_many_requests_leave_the_process_as_it_was(server_process: StartServer) -> None:
    """1,000 requests of every dialect on the real engine."""
    server = server_process("--demo", "--port", "0", is_forked=True)
    url = server.url_when_ready()
    counts, found = asyncio.run(endure(server, url, 1000))
    assert counts.total() == 1000
    assert found[-1].leaks_since(found[0]) == []


def main() -> int:
    """Run from the command line; exit code 1 after a leak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--clients", type=int, default=1, help="each sends one after another")
    given = parser.parse_args()
    with running_server(Path(tempfile.gettempdir()), "--demo") as server:
        run = endure(server.process, server.url, given.requests, given.clients)
        counts, found = asyncio.run(run)
    leaks = found[-1].leaks_since(found[0])
    print(dict(counts), *(leaks or ["nothing leaked"]), sep="\n")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
