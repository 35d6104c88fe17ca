"""The servers that are compared: ours and vLLM's own, on the same model and engine arguments."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.demo import DEMO_MODEL_DIR

GIVE_UP_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.02
PROMPT: Final = "Once upon a time"
# What the demo's serving.properties says, in vLLM's words.
ENGINE_ARGUMENTS: Final[Mapping[str, Any]] = {
    "model": str(DEMO_MODEL_DIR),
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "enforce_eager": True,
    "enable_lora": True,
    "max_loras": 2,
    "kv_cache_memory_bytes": 268435456,
}
# Set, each step of every engine takes at least that many milliseconds (`paced_worker`).
STEP_VARIABLE: Final = "BENCH_STEP_MS"
PACED_WORKER: Final = "integration.bench.paced_worker.PacedWorker"
ADAPTERS: Final = ("capitals", "json")
QUIET: Final[Mapping[str, str]] = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # As our demo does: two bound threads wait for each other on a busy machine.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Running:
    """A started server."""

    process: "subprocess.Popen[bytes]"
    url: str


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def engine_arguments() -> dict[str, Any]:
    """Return the arguments of every engine that is measured."""
    paced = {"worker_cls": PACED_WORKER} if os.environ.get(STEP_VARIABLE) else {}
    return {**ENGINE_ARGUMENTS, **paced}


def our_command(port: int) -> list[str]:
    """Return our server on the embedded model."""
    return [sys.executable, "-m", "lmi_vllm", "serve", "--demo", "--port", str(port)]


def their_command(port: int) -> list[str]:
    """Return vLLM's own server with the arguments of the demo's serving.properties.

    Its log is as it comes, a line for each request like ours.
    """
    flags: list[str] = []
    for name, value in engine_arguments().items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    adapters = [f"{name}={DEMO_MODEL_DIR}/adapters/{name}" for name in ADAPTERS]
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "lmi",
        *flags, "--lora-modules", *adapters,
    ]  # fmt: skip


def start(
    command: list[str],
    environ: Mapping[str, str] = MappingProxyType({}),
    log: Path = Path(os.devnull),
) -> "subprocess.Popen[bytes]":
    """Start a server whose output goes to `log`; `environ` is added to this process's own."""
    paced = {"OPTION_WORKER_CLS": PACED_WORKER} if os.environ.get(STEP_VARIABLE) else {}
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ) | dict(QUIET) | paced | dict(environ),
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a server."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def running(
    command: Callable[[int], list[str]],
    health: str,
    environ: Mapping[str, str] = MappingProxyType({}),
    log: Path = Path(os.devnull),
) -> Iterator[Running]:
    """Start a server, wait until it is ready, end it."""
    port = free_port()
    process = start(command(port), environ, log)
    try:
        wait(process, lambda: is_healthy(port, health))
        yield Running(process, f"http://127.0.0.1:{port}")
    finally:
        stop(process)


def wait(process: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> None:
    """Return once `condition` holds."""
    began = time.monotonic()
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}: {process.args!r}")
        if time.monotonic() - began > GIVE_UP_SECONDS:
            raise SystemExit("gave up waiting")
        time.sleep(POLL_SECONDS)


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
