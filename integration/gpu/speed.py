"""Throughput, time to first token and the front end's CPU, against vLLM's two front ends.

Every server gets the same dummy weights and the same engine arguments, one server at a time: each
takes the whole device. Prompts are equal words, all answers have the same length.
"""

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from integration.bench.front_ends import PROCESSES, front_ends, spent
from integration.bench.rust_front_end import NoRustFrontEndError, rust_binary, rust_environment
from integration.bench.servers import Running, running
from integration.bench.serving import Load, load
from integration.gpu.models import engine_arguments, write_shape
from integration.gpu.suite import Suite

LEVELS: Final = (1, 64, 256, 512)
CPU_LEVELS: Final = (1, 8)
FRONT_ENDS: Final = 4  # of our second row, where the machine has cores for them
CORES: Final = 2 * FRONT_ENDS  # the engine and the clients take some
TOKENS: Final = 128
ROUNDS: Final = 4  # requests of each stream
STREAMS_OF_A_CLIENT: Final = 64
HEAD: Final = [
    "server", "streams", "tokens/s", "first token p50, ms", "p99, ms", "front-end CPU, µs a token",
]  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One server: how it is started, where it says that it is ready, what it is asked in."""

    name: str
    command: Callable[[int], list[str]]
    health: str
    dialects: tuple[str, ...]
    environ: Mapping[str, str]


def throughput(suite: Suite) -> str:
    """Measure every server at every number of streams; a server that cannot be had is named.

    Raises:
        AssertionError: one that is here did not start or answer; what the others did is kept.
    """
    model = write_shape(suite)
    rows: list[list[str]] = []
    suite.tables.append((f"Dummy weights of the {suite.shape} shape", HEAD, rows))
    ready: list[list[str]] = []
    suite.tables.append(("Seconds until ready", ["server", "seconds"], ready))
    found, missing = candidates(suite, model)
    failed: list[str] = []
    for candidate in found:
        suite.end_demo()
        suite.wait_for_memory()
        try:
            ready.append([candidate.name, f"{rows_of(suite, candidate, rows):.1f}"])
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the others are measured, too)
            failed.append(f"{candidate.name}: {type(error).__name__}: {str(error)[:300]}")
    best: dict[str, float] = {}
    for name, _, rate, *_ in rows:
        best[name] = max(best.get(name, 0.0), float(rate))
    said = "; ".join(f"{name} at most {rate:.0f} tokens/s" for name, rate in best.items())
    text = "; ".join(filter(None, (said, missing)))
    assert not failed, f"{'; '.join(failed)}; {text}"
    return text


def rows_of(suite: Suite, candidate: Candidate, rows: list[list[str]]) -> float:
    """Add a row for each number of streams, as soon as it is known; return seconds until ready."""
    levels = suite.levels or (LEVELS if suite.machine.has_gpu else CPU_LEVELS)
    log = suite.folder / f"{candidate.name.replace(' ', '-')}.log"
    began = time.monotonic()
    with running(candidate.command, candidate.health, candidate.environ, log) as server:
        seconds = time.monotonic() - began
        for dialect in candidate.dialects:
            for streams in levels:
                measured, micros = measure(server, dialect, streams)
                rows.append(_row(f"{candidate.name} ({dialect})", streams, measured, micros))
    return seconds


def measure(server: Running, dialect: str, streams: int) -> tuple[Load, float]:
    """Return what the load commands found, and CPU microseconds of the front end for each token.

    One of them, a process of Python, would be what bounds hundreds of streams.
    """
    clients = max(1, streams // STREAMS_OF_A_CLIENT)
    share = streams // clients
    load(server, dialect, streams, streams, 8)  # warm up
    processes = front_ends(server)
    before = sum(spent(processes))
    with ThreadPoolExecutor(clients) as pool:
        asked = [
            pool.submit(load, server, dialect, share, share * ROUNDS, TOKENS)
            for _ in range(clients)
        ]
        found = [one.result() for one in asked]
    seconds = sum(spent(processes)) - before
    whole = Load(
        sum(one.tokens_per_second for one in found),
        statistics.median(one.first_token_p50 for one in found),
        max(one.first_token_p99 for one in found),
    )
    return whole, seconds / (share * clients * ROUNDS * TOKENS) * 1e6


def candidates(suite: Suite, model: Path) -> tuple[list[Candidate], str]:
    """Return the servers that can be had here, and which one cannot."""
    flags = vllm_flags(suite)
    own = dict(suite.environ)
    command = partial(our_command, model)
    ours = [Candidate("lmi_vllm", command, "/ping", ("lmi", "chat"), own)]
    if (os.cpu_count() or 1) >= CORES:
        several = own | {PROCESSES: str(FRONT_ENDS)}
        name = f"lmi_vllm, {FRONT_ENDS} front ends"
        ours.append(Candidate(name, command, "/ping", ("chat",), several))
    theirs = Candidate(
        "vllm serve", partial(their_command, model, flags), "/health", ("chat",), own
    )
    if not suite.machine.has_gpu:
        return [*ours, theirs], "vllm-rs is measured on a GPU only"
    try:
        binary = installed_rust() or rust_binary()
    except NoRustFrontEndError as error:
        return [*ours, theirs], f"vllm-rs was not measured: {error}"
    environ = own if installed_rust() else own | rust_environment()
    rust = Candidate(
        "vllm-rs", partial(rust_command, binary, model, flags), "/health", ("chat",), environ
    )
    return [*ours, theirs, rust], ""


def vllm_flags(suite: Suite) -> list[str]:
    """Return the engine arguments as flags of vLLM."""
    flags: list[str] = []
    for name, value in engine_arguments(suite).items():
        flags.append(f"--{name.replace('_', '-')}")
        if value is not True:
            flags.append(str(value))
    return flags


def our_command(model: Path, port: int) -> list[str]:
    """Return our server; the model's folder says the rest."""
    return [sys.executable, "-m", "lmi_vllm", "serve", "--model", str(model), "--port", str(port)]


def their_command(model: Path, flags: list[str], port: int) -> list[str]:
    """Return `vllm serve`."""
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "lmi", "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip


def rust_command(binary: Path, model: Path, flags: list[str], port: int) -> list[str]:
    """Return vLLM's front end in Rust."""
    return [
        str(binary), "serve", str(model), "--served-model-name", "lmi", "--port", str(port),
        "--python", sys.executable, "--", *flags,
    ]  # fmt: skip


def installed_rust() -> Path | None:
    """Return the front end that the installed wheel carries; the one for a CPU carries none."""
    found = importlib.util.find_spec("vllm")
    places = (found.submodule_search_locations if found else None) or ()
    return next(
        (path for place in places if os.access(path := Path(place) / "vllm-rs", os.X_OK)), None
    )


def _row(name: str, streams: int, measured: Load, micros: float) -> list[str]:
    return [
        name, str(streams), f"{measured.tokens_per_second:.0f}",
        f"{measured.first_token_p50:.1f}", f"{measured.first_token_p99:.1f}", f"{micros:.0f}",
    ]  # fmt: skip
