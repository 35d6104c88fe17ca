"""How the front end's cost per token grows: with streams, answers, prompts and adapters.

    python -m integration.bench growth [--rounds 3] [--step-ms 40]

Our LMI lane without log probabilities, in CPU microseconds of the front-end process per streamed
token, as `tokens` measures it; one thing is changed at a time.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from integration.adapters_support import write_weights
from integration.bench.results import Plot, Result, Table, spread
from integration.bench.servers import STEP_VARIABLE, Running, our_command, running
from integration.bench.tokens import Lane, cost

STREAMS, TOKENS, WORDS = 64, 64, 4  # what holds while another grows
ADAPTER_SLOTS: Final = 2  # max_loras of the demo: more are loaded in turns
GROWTH: Final[Mapping[str, Sequence[int]]] = {
    "streams": (1, 16, 64, 256),
    "tokens of an answer": (16, 64, 256, 1024),
    "words of the prompt": (4, 64, 256, 768),
    "registered adapters": (0, 2, 16, 64),
}


def _body(words: int, tokens: int) -> Mapping[str, Any]:
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True, "logprobs": False}
    return {"inputs": "word " * words, "stream": True, "parameters": parameters}


def lane(words: int = WORDS) -> Lane:
    """Return the lane with a prompt of so many words."""
    return Lane("LMI, no logprobs", "/invocations", partial(_body, words), b'"token":')


async def register(url: str, folder: Path, numbers: Sequence[int]) -> None:
    """Register an adapter for each number."""
    async with aiohttp.ClientSession(url) as session:
        for number in numbers:
            name = f"grown-{number}"
            source = str(write_weights(folder / name, seed=number))
            query = {"name": name, "src": source}
            async with session.post("/adapters", params=query) as response:
                if response.status != 200:
                    raise AssertionError(await response.text())


def measure(server: Running, what: str, size: int) -> float:
    """Return the microseconds per token where `what` is of that size."""
    streams = size if what == "streams" else STREAMS
    tokens = size if what == "tokens of an answer" else TOKENS
    words = size if what == "words of the prompt" else WORDS
    return cost(server, lane(words), streams, tokens)[0]


def main() -> Result:
    """Measure in turns; adapters come last, as they stay."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=40)
    given = parser.parse_args()
    if given.step_ms:
        os.environ[STEP_VARIABLE] = str(given.step_ms)
    os.environ["OPTION_MAX_CPU_LORAS"] = str(max(GROWTH["registered adapters"]) + ADAPTER_SLOTS)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(our_command, "/ping") as server,
    ):
        measure(server, "streams", max(GROWTH["streams"]))  # warm up
        for what, sizes in GROWTH.items():
            if what == "registered adapters":
                continue
            for _ in range(given.rounds):
                for size in sizes:
                    found[what, size].append(measure(server, what, size))
        before = 0
        for size in GROWTH["registered adapters"]:
            asyncio.run(register(server.url, Path(folder), range(before, size)))
            before = size
            for _ in range(given.rounds):
                found["registered adapters", size].append(
                    measure(server, "registered adapters", size)
                )
    tables = [
        Table(
            f"CPU microseconds per token, by {what}",
            [what, *map(str, sizes)],
            [["ours: LMI", *(spread(found[what, size]) for size in sizes)]],
        )
        for what, sizes in GROWTH.items()
    ]
    plots = [
        Plot(
            f"CPU per token by {what}",
            what,
            "microseconds",
            {"ours: LMI": [(float(n), statistics.median(found[what, n])) for n in sizes]},
        )
        for what, sizes in GROWTH.items()
    ]
    fixed = f"What does not grow: {STREAMS} streams, {TOKENS} tokens, {WORDS} words, no adapters."
    return Result(tables, (), plots, [fixed])
