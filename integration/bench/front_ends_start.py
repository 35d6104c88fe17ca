"""What further front ends cost a start, forked against spawned: seconds, CPU seconds, memory.

    python -m integration.bench front_ends_start [--rounds 3] [--count 3]

The embedded model, one server after the other in turns. Read at ready, when every process answers;
memory is what processes hold alone plus their part of what they share (PSS).
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import psutil

from integration.bench.cpu_time import cpu_seconds
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import free_port, is_healthy, our_command, start, stop, wait
from integration.processes_of_a_server import further_front_ends, template_of

MIB: Final = 1 << 20
FORKED: Final = "forked"
SPAWNED: Final = "spawned"
PROGRAMS: Final = MappingProxyType(
    {FORKED: "lmi_vllm", SPAWNED: "integration.bench.spawned_front_ends"}
)
MOST_CPU: Final = 0.75  # of the CPU seconds with spawned ones, at three front ends


@dataclass(frozen=True)
class Started:
    """A ready server: seconds since its start, CPU seconds of all processes, and bytes."""

    ready: float
    cpu: float
    memory: float
    each_cpu: float  # of a further front end, on average
    each_memory: float


def measure(method: str, count: int) -> Started:
    """Return the figures of one start."""
    port = free_port()
    command = our_command(port)
    command[command.index("lmi_vllm")] = PROGRAMS[method]
    began = time.monotonic()
    server = start(command, {"LMI_FRONTEND_PROCESSES": str(count)})
    try:
        wait(server, lambda: is_healthy(port, "/ping"))
        ready = time.monotonic() - began
        further = further_front_ends(server.pid)
        assert len(further) == count - 1
        assert (template_of(server.pid) is not None) is (method == FORKED)
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(True)]
        return Started(
            ready,
            sum(cpu_seconds(each.pid) for each in processes),
            sum(held(each) for each in processes) / MIB,
            statistics.mean(cpu_seconds(each.pid) for each in further),
            statistics.mean(held(each) for each in further) / MIB,
        )
    finally:
        stop(server)


def held(process: psutil.Process) -> float:
    """Return the bytes that a process holds, with its part of shared ones."""
    return float(process.memory_full_info().pss)


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[Started]] = {method: [] for method in PROGRAMS}
    for _ in range(given.rounds):
        for method, starts in found.items():
            starts.append(measure(method, given.count))
    rows = [
        [
            method,
            spread([one.ready for one in starts]),
            spread([one.cpu for one in starts]),
            spread([one.memory for one in starts], 0),
            spread([one.each_cpu for one in starts]),
            spread([one.each_memory for one in starts], 0),
        ]
        for method, starts in found.items()
    ]
    head = ["further front ends", "ready, s", "CPU s", "PSS, MiB", "CPU s of each", "PSS of each"]
    title = f"A start with {given.count} front ends; all processes, and a further front end"
    cpu = {name: statistics.median(one.cpu for one in starts) for name, starts in found.items()}
    claim = Claim("CPU seconds of a start, forked / spawned", cpu[FORKED] / cpu[SPAWNED], MOST_CPU)
    return Result([Table(title, head, rows)], [claim])
