"""CPU of the front-end process per request that is not streamed, and the memory a server holds.

    python -m integration.bench requests [--rounds 9] [--requests 400]

Ours against vLLM's server: both run at once on the same engine arguments, measured in turns.
The engine cores are processes of their own and do not count. Nor does this process, the client.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import psutil

from integration.bench.cpu_time import cpu_seconds
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import PROMPT, Running, our_command, running, their_command

CONCURRENCY: Final = 16
TOKENS: Final = 8
REQUEST_TARGET: Final = 0.6  # of issue 20
LMI: Final[dict[str, Any]] = {
    "inputs": PROMPT,
    "parameters": {"max_new_tokens": TOKENS, "ignore_eos_token": True},
}
OPENAI: Final[dict[str, Any]] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
COMPLETIONS = ("/v1/completions", OPENAI | {"prompt": PROMPT})
CHAT = ("/v1/chat/completions", OPENAI | {"messages": [{"role": "user", "content": PROMPT}]})


async def ask(url: str, path: str, body: Mapping[str, Any], requests: int) -> None:
    """Send so many requests, some at a time; each has to be answered."""
    places = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession(url) as session:

        async def one() -> None:
            async with places, session.post(path, json=body) as response:
                raw = await response.read()
            if response.status != 200:
                raise AssertionError(raw)

        await asyncio.gather(*(one() for _ in range(requests)))


def cost(server: Running, path: str, body: Mapping[str, Any], requests: int) -> float:
    """Return the CPU microseconds that the front end spent on each."""
    before = cpu_seconds(server.process.pid)
    asyncio.run(ask(server.url, path, body, requests))
    return (cpu_seconds(server.process.pid) - before) / requests * 1e6


@dataclass(frozen=True)
class Memory:
    """MiB of a server. A share counts what processes have in common once (PSS, Linux)."""

    resident: float  # of the front end, as `ps` shows it
    share: float  # of the front end
    whole: float  # shares of all its processes: the engine's, too

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        return [f"{self.resident:.0f}", f"{self.share:.0f}", f"{self.whole:.0f}"]


def memory(server: Running) -> Memory:
    """Measure it."""
    front = psutil.Process(server.process.pid)
    found = [one.memory_full_info() for one in (front, *front.children(recursive=True))]
    shares = [one.pss / 2**20 for one in found]
    return Memory(found[0].rss / 2**20, shares[0], sum(shares))


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=400)
    given = parser.parse_args()
    found: dict[str, list[float]] = defaultdict(list)
    with running(our_command, "/ping") as ours, running(their_command, "/health") as theirs:
        servers = {"ours": ours, "vLLM": theirs}
        lanes = {
            "ours: LMI": (ours, "/invocations", LMI),
            "ours: completions": (ours, *COMPLETIONS),
            "ours: chat": (ours, *CHAT),
            "vLLM: completions": (theirs, *COMPLETIONS),
            "vLLM: chat": (theirs, *CHAT),
        }
        fresh = {name: memory(server) for name, server in servers.items()}
        for lane in lanes.values():
            cost(*lane, given.requests)  # warm up
        for _ in range(given.rounds):
            for name, lane in lanes.items():
                found[name].append(cost(*lane, given.requests))
        used = {name: memory(server) for name, server in servers.items()}
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [[name, spread(values, 0)] for name, values in found.items()]
    title = (
        f"CPU microseconds of the front end per request of {TOKENS} tokens, {CONCURRENCY} at once"
    )
    sent = (given.rounds + 1) * given.requests
    held = [
        [f"{name}, {when}", *one[name].cells()]
        for name in servers
        for when, one in (("when ready", fresh), (f"after {sent} requests a lane", used))
    ]
    return Result(
        [
            Table(title, ["server and lane", "median (least to most)"], rows),
            Table(
                "MiB of memory; what processes share is counted once but for the first column",
                ["server", "front end, resident", "front end", "all processes"],
                held,
            ),
        ],
        [
            Claim(f"{text}, ours / vLLM", value, target)
            for text, value, target in (
                (
                    "CPU per completion",
                    medians["ours: completions"] / medians["vLLM: completions"],
                    REQUEST_TARGET,
                ),
                ("CPU per chat", medians["ours: chat"] / medians["vLLM: chat"], REQUEST_TARGET),
                ("memory of all processes", used["ours"].whole / used["vLLM"].whole, 1.0),
            )
        ],
    )
