"""Seconds from process start to an open port and to ready, ours against vLLM's own server.

    python -m integration.bench startup [--runs 3]

Both serve the embedded model with the same engine arguments and adapters, one after the other in
turns, so that the machine's mood hits both. One turn before is not counted: ours, as the first,
would read the libraries of both from the disk. Then ours with `enforce_eager=false`, so that vLLM
compiles: in a container with empty caches, in two that LMI_CACHE_URI fills, and restarted there.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

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
from lmi_vllm.demo import DEMO_MODEL_DIR

EMPTY, RESTORED, WARM = "empty caches", "restored by LMI_CACHE_URI", "restarted, warm"
# The embedded model as it is in serving.properties but for two lines: with LoRA on a CPU, or with
# enforce_eager, vLLM compiles nothing.
COMPILED: Final = """
option.dtype=fp32
option.max_model_len=2048
option.max_rolling_batch_size=64
option.kv_cache_memory_bytes=268435456
option.enforce_eager=false
"""


@dataclass(frozen=True)
class Start:
    """Seconds since the process was started."""

    port_open: float
    ready: float


def measure(
    command: list[str],
    port: int,
    health: str,
    environ: Mapping[str, str] = MappingProxyType({}),
    until: Path | None = None,
) -> Start:
    """Return the seconds of one start; the server is ended afterwards, once `until` has files."""
    began = time.monotonic()
    process = start(command, environ)
    try:
        wait(process, lambda: is_open(port))
        port_open = time.monotonic() - began
        wait(process, lambda: is_healthy(port, health))
        ready = time.monotonic() - began
        if until is not None:
            wait(process, lambda: any(until.glob("*.tar.gz")))
        return Start(port_open, ready)
    finally:
        stop(process)


def measure_caches() -> dict[str, list[Start]]:
    """Return starts of each kind, in containers with a disk of their own and one store."""
    with tempfile.TemporaryDirectory(prefix="bench-caches-") as folder:
        root = Path(folder)
        model, store = root / "model", root / "store"
        shutil.copytree(DEMO_MODEL_DIR, model, ignore=shutil.ignore_patterns("adapters"))
        (model / "serving.properties").write_text(COMPILED, encoding="utf-8")

        def begin(disk: str) -> Start:
            (root / disk).mkdir(exist_ok=True)
            port = free_port()
            command = [sys.executable, "-m", "lmi_vllm", "serve", "--model", str(model)]
            environ = {
                "LMI_CACHE_URI": str(store),
                "HOME": str(root / disk),
                "XDG_CACHE_HOME": str(root / disk / ".cache"),
            }
            return measure([*command, "--port", str(port)], port, "/ping", environ, store)

        found = {EMPTY: [begin("first")], RESTORED: [], WARM: []}
        for disk in ("second", "third"):  # in turns
            found[RESTORED].append(begin(disk))
            found[WARM].append(begin(disk))
        return found


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    ours, theirs = [], []
    for turn in range(runs + 1):
        port = free_port()
        own = measure(our_command(port), port, "/ping")
        port = free_port()
        other = measure(their_command(port), port, "/health")
        if turn:
            ours.append(own)
            theirs.append(other)
    rows = [
        [
            name,
            spread([start.port_open for start in starts], 2),
            spread([start.ready for start in starts]),
        ]
        for name, starts in (("ours", ours), ("vLLM", theirs))
    ]
    table = Table("Seconds from the process's start", ["server", "port open", "ready"], rows)
    cached = [measure_caches() for _ in range(runs)]
    ready = {kind: [one.ready for found in cached for one in found[kind]] for kind in cached[0]}
    caches = Table(
        "Seconds to ready with enforce_eager=false, by what the container's disk holds",
        ["compile caches", "ready"],
        [[kind, spread(seconds)] for kind, seconds in ready.items()],
    )
    median = {kind: statistics.median(seconds) for kind, seconds in ready.items()}
    port_open = statistics.median(start.port_open for start in ours)
    ratio = statistics.median(s.ready for s in ours) / statistics.median(s.ready for s in theirs)
    return Result(
        [table, caches],
        [
            Claim("seconds until our port is open", port_open, 1.0),
            Claim("ready, ours / vLLM", ratio, 0.3),
            Claim("ready, caches restored / restarted", median[RESTORED] / median[WARM], 1.1),
            Claim("ready, caches restored / empty", median[RESTORED] / median[EMPTY], 0.5),
        ],
    )
