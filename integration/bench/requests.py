"""CPU of the front-end process per request that is not streamed, and the memory it holds.

    python -m integration.bench requests [--rounds 5] [--requests 400]

Ours against vLLM's server, on the same engine arguments and at once, measured in turns; the engine
cores are processes of their own and do not count, nor does this process, which is the client.
"""

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import psutil

from integration.bench.cpu_time import cpu_seconds
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import PROMPT, Running, our_command, running, their_command

CONCURRENCY: Final = 16
TOKENS: Final = 8
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


def resident(server: Running) -> float:
    """Return the MiB of memory of the front-end process."""
    rss: int = psutil.Process(server.process.pid).memory_info().rss
    return rss / 2**20


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
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
        fresh = {name: resident(server) for name, server in servers.items()}
        for lane in lanes.values():
            cost(*lane, given.requests)  # warm up
        for _ in range(given.rounds):
            for name, lane in lanes.items():
                found[name].append(cost(*lane, given.requests))
        used = {name: resident(server) for name, server in servers.items()}
    medians = {name: statistics.median(values) for name, values in found.items()}
    rows = [[name, spread(values, 0)] for name, values in found.items()]
    title = (
        f"CPU microseconds of the front end per request of {TOKENS} tokens, {CONCURRENCY} at once"
    )
    memory = [[name, f"{fresh[name]:.0f}", f"{used[name]:.0f}"] for name in servers]
    sent = (given.rounds + 1) * given.requests
    return Result(
        [
            Table(title, ["server and lane", "median (least to most)"], rows),
            Table(
                "Resident MiB of the front-end process",
                ["server", "when ready", f"after {sent} requests a lane"],
                memory,
            ),
        ],
        [
            Claim(f"{text}, ours / vLLM", value, 1.0)
            for text, value in (
                ("CPU per completion", medians["ours: completions"] / medians["vLLM: completions"]),
                ("CPU per chat", medians["ours: chat"] / medians["vLLM: chat"]),
                ("memory after the load", used["ours"] / used["vLLM"]),
            )
        ],
    )
