"""Seconds from process start to an open port and to ready, ours against vLLM's own server.

    python -m integration.bench startup [--runs 3]

Both serve the embedded model with the same engine arguments and adapters, one after the other in
turns, so that the machine's mood hits both. Prints a table with medians and the ratio.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

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


def main() -> None:
    """Measure in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    ours, theirs = [], []
    for _ in range(runs):
        port = free_port()
        ours.append(measure(our_command(port), port, "/ping"))
        port = free_port()
        theirs.append(measure(their_command(port), port, "/health"))
    print(f"{'server':<34}{'port open, s':>14}{'ready, s':>10}   ({runs} runs each, medians)")
    rows = (("lmi_vllm serve --demo", ours), ("vllm ... openai.api_server", theirs))
    for name, starts in rows:
        opened = statistics.median(start.port_open for start in starts)
        ready = statistics.median(start.ready for start in starts)
        print(f"{name:<34}{opened:>14.2f}{ready:>10.1f}")
    ratio = statistics.median(s.ready for s in ours) / statistics.median(s.ready for s in theirs)
    print(f"ready, ours / theirs: {ratio:.2f}")


if __name__ == "__main__":
    main()
