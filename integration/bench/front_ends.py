"""Several front-end processes over one engine: tokens a second, and whose CPU they take.

    python -m integration.bench front_ends [--counts 1,2,4] [--rounds 3] [--step-ms 40]

The LMI lane without log probabilities. Steps of the engine are paced for the CPU per token, and
not for the throughput, where all processes, the engine and the load share this machine's cores.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psutil

from integration.bench.cpu_time import cpu_seconds
from integration.bench.results import Plot, Result, Table, spread
from integration.bench.servers import STEP_VARIABLE, Running, our_command, running
from integration.bench.serving import load
from integration.bench.tokens import LMI_PLAIN
from integration.bench.tokens import load as load_here
from integration.processes_of_a_server import further_front_ends

STREAMS: Final = 128
PROCESSES: Final = "LMI_FRONTEND_PROCESSES"


@dataclass(frozen=True)
class Cost:
    """CPU microseconds per token: of all front-end processes, and of the busiest of them."""

    total: float
    busiest: float


def front_ends(server: Running) -> list[psutil.Process]:
    """Return the front-end processes, the first one first."""
    return [psutil.Process(server.process.pid), *further_front_ends(server.process.pid)]


def spent(processes: Sequence[psutil.Process]) -> list[float]:
    """Return the CPU seconds of each."""
    return [cpu_seconds(process.pid) for process in processes]


def cost(server: Running, tokens: int) -> Cost:
    """Return what a load costs."""
    processes = front_ends(server)
    before = spent(processes)
    asyncio.run(load_here(server.url, LMI_PLAIN, STREAMS, tokens))
    each = [after - earlier for after, earlier in zip(spent(processes), before, strict=True)]
    count = STREAMS * tokens / 1e6
    return Cost(sum(each) / count, max(each) / count)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def main() -> Result:
    """Measure one count after the other: four servers at once would not fit two cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    counts = [int(word) for word in given.counts.split(",")]
    rows, memory = [], {}
    throughput: dict[int, float] = {}
    for count in counts:
        name = {PROCESSES: str(count)}
        with _environment(**name), running(our_command, "/ping") as server:
            load(server, "lmi", STREAMS, STREAMS, 8)
            speeds = [
                load(server, "lmi", STREAMS, 2 * STREAMS, given.tokens).tokens_per_second
                for _ in range(given.rounds)
            ]
            sizes = [process.memory_info().rss / 2**20 for process in front_ends(server)]
            memory[count] = ", ".join(f"{size:.0f}" for size in sizes)
        paced = {**name, STEP_VARIABLE: str(given.step_ms)}
        with _environment(**paced), running(our_command, "/ping") as server:
            cost(server, 8)
            costs = [cost(server, given.tokens) for _ in range(given.rounds)]
        throughput[count] = statistics.median(speeds)
        rows.append(
            [
                str(count),
                spread(speeds),
                spread([one.total for one in costs]),
                spread([one.busiest for one in costs]),
                memory[count],
            ]
        )
    head = ["processes", "tokens/s", "CPU us per token", "of the busiest", "MiB of each"]
    table = Table(f"Front-end processes over one engine, {STREAMS} streams", head, rows)
    plot = Plot(
        "Throughput by front-end processes",
        "processes",
        "tokens/s",
        {"ours: LMI": [(float(count), speed) for count, speed in throughput.items()]},
    )
    note = (
        "CPU of the busiest process is what limits a server whose engine is faster than one front "
        f"end; this machine has {os.cpu_count()} cores for the engine, the load and all of them."
    )
    return Result([table], (), [plot], [note])
