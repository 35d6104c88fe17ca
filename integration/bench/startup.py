"""Seconds from process start to an open port and to ready, ours against vLLM's own server.

    python -m integration.bench.startup [--runs 3]

Both serve the embedded model with the same engine arguments and adapters, one after the other in
turns, so that the machine's mood hits both. Prints a table with medians and the ratio.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from lmi_vllm.demo import DEMO_MODEL_DIR

GIVE_UP_SECONDS = 300.0
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Start:
    """Seconds since the process was started."""

    port_open: float
    ready: float


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def our_command(port: int) -> list[str]:
    """Return our server on the embedded model."""
    return [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", str(port)]


def their_command(port: int) -> list[str]:
    """Return vLLM's own server with the arguments of the demo's serving.properties."""
    adapters = [f"{name}={DEMO_MODEL_DIR}/adapters/{name}" for name in ("capitals", "json")]
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(DEMO_MODEL_DIR), "--port", str(port), "--host", "127.0.0.1",
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64",
        "--enforce-eager", "--enable-lora", "--max-loras", "2",
        "--kv-cache-memory-bytes", "268435456", "--lora-modules", *adapters,
    ]  # fmt: skip


def measure(command: list[str], port: int, health: str) -> Start:
    """Return the seconds of one start; the server is ended afterwards."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=dict(os.environ) | {"VLLM_NO_USAGE_STATS": "1"},
    )
    try:
        port_open = wait(began, process, lambda: is_open(port))
        ready = wait(began, process, lambda: is_healthy(port, health))
        return Start(port_open, ready)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait(began: float, process: "subprocess.Popen[bytes]", condition) -> float:  # type: ignore[no-untyped-def]
    """Return the seconds until `condition` holds."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}: {process.args!r}")
        if time.monotonic() - began > GIVE_UP_SECONDS:
            raise SystemExit("gave up waiting")
        time.sleep(POLL_SECONDS)
    return time.monotonic() - began


def is_open(port: int) -> bool:
    """Whether something listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def is_healthy(port: int, path: str) -> bool:
    """Whether the health route says 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


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
