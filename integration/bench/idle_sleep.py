"""Seconds until the first token of the request that wakes an idle model, beside those of a start.

    python -m integration.bench idle_sleep [--runs 5]

The embedded model: LMI_SLEEP_LEVEL=stop ends its engine and starts another one, in a process that
has imported vLLM. What the machine's memory has free is read before, asleep and afterwards.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass
from typing import Final

import psutil

from integration.bench.first_token import first_token
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import free_port, is_healthy, start, stop, wait

WORDS: Final = 8
MIB: Final = 1 << 20
MOST_OF_A_START: Final = 0.5  # that waking may take


@dataclass(frozen=True)
class Cycle:
    """One sleep: seconds until the memory was back, until the first token, and bytes."""

    sleep: float
    first_token: float
    freed: float  # bytes of the server and its children


def used(process: psutil.Process) -> int:
    """Return the bytes that the server and its children hold alone, or share among them."""
    return sum(int(one.memory_full_info().pss) for one in (process, *process.children(True)))


def cycle(url: str, process: psutil.Process) -> Cycle:
    """Put the model to sleep, and wake it by a stream."""
    before, began = used(process), time.monotonic()
    request = urllib.request.Request(f"{url}/server/sleep", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["status"] == "Asleep"
    slept = time.monotonic() - began
    freed = before - used(process)
    return Cycle(slept, first_token(url, "lmi", 1, WORDS) / 1e3, freed)


def main() -> Result:
    """Measure one server over several sleeps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    port = free_port()
    began = time.monotonic()
    server = start([sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", str(port)])
    try:
        wait(server, lambda: is_healthy(port, "/ping"))
        ready = time.monotonic() - began
        url = f"http://127.0.0.1:{port}"
        awake = first_token(url, "lmi", 5, WORDS)
        cycles = [cycle(url, psutil.Process(server.pid)) for _ in range(runs)]
    finally:
        stop(server)
    tokens = [each.first_token for each in cycles]
    median = statistics.median(tokens)
    rows = [
        ["from the start of the process to ready", f"{ready:.1f} s"],
        ["first token, awake", f"{awake:.1f} ms"],
        ["until the memory is given back", f"{spread([each.sleep for each in cycles])} s"],
        ["first token of the request that wakes it", f"{spread(tokens)} s"],
        ["memory given back", f"{spread([each.freed / MIB for each in cycles], 0)} MiB"],
    ]
    claim = Claim(
        "first token of the request that wakes it / start", median / ready, MOST_OF_A_START
    )
    return Result([Table("Sleep of an idle model (stop)", ["what", "median"], rows)], [claim])
