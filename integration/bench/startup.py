"""Seconds from process start to an open port and to ready, ours against vLLM's own server.

    python -m integration.bench startup [--runs 3]

Both serve the embedded model with the same engine arguments and adapters, one after the other in
turns, so that the machine's mood hits both.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import (
    free_port,
    is_healthy,
    is_open,
    our_command,
    start,
    stop,
    their_command,
    wait,
)


@dataclass(frozen=True)
class Start:
    """Seconds since the process was started."""

    port_open: float
    ready: float


def measure(command: list[str], port: int, health: str) -> Start:
    """Return the seconds of one start; the server is ended afterwards."""
    began = time.monotonic()
    process = start(command)
    try:
        wait(process, lambda: is_open(port))
        port_open = time.monotonic() - began
        wait(process, lambda: is_healthy(port, health))
        return Start(port_open, time.monotonic() - began)
    finally:
        stop(process)


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    ours, theirs = [], []
    for _ in range(runs):
        port = free_port()
        ours.append(measure(our_command(port), port, "/ping"))
        port = free_port()
        theirs.append(measure(their_command(port), port, "/health"))
    rows = [
        [
            name,
            spread([start.port_open for start in starts], 2),
            spread([start.ready for start in starts]),
        ]
        for name, starts in (("ours", ours), ("vLLM", theirs))
    ]
    table = Table("Seconds from the process's start", ["server", "port open", "ready"], rows)
    port_open = statistics.median(start.port_open for start in ours)
    ratio = statistics.median(s.ready for s in ours) / statistics.median(s.ready for s in theirs)
    return Result(
        [table],
        [
            Claim("seconds until our port is open", port_open, 1.0),
            Claim("ready, ours / vLLM", ratio, 0.5),
        ],
    )
