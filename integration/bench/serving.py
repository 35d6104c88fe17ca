"""Throughput and time to first token at several numbers of streams, ours against vLLM's server.

    python -m integration.bench serving [--levels 1,16,64,256] [--rounds 3] [--tokens 64]

Both run at once on the same engine arguments, and vLLM's front end in Rust, `vllm-rs`, beside them
if the wheel of this release is available. `lmi-vllm bench`, a process of its own, loads them in
turns with greedy requests. `first_token` measures what the HTTP layer adds to the first token: one
stream at a time over a bare socket, compared with the bare engine in its own process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from integration.bench.first_token import first_token
from integration.bench.floor_process import Floor, floor
from integration.bench.report import THROUGHPUT
from integration.bench.results import Claim, Plot, Result, Table, spread
from integration.bench.rust_front_end import rust_front_end
from integration.bench.servers import Running, our_command, running, their_command
from lmi_vllm.demo import DEMO_MODEL_DIR

PROMPT_WORDS: Final = 16
THEIR_STREAMS: Final = 64
SINGLE_REQUESTS: Final = 60  # one after another, for the time to the first token
SINGLE_ROUNDS: Final = 9
ADDED_MILLISECONDS: Final = 2.0  # target of issue 8, at p50
RUST: Final = "vllm-rs: completions"
# Target of issue 20 for the first token beside `vllm-rs`, and the numbers of streams it is for.
BESIDE_RUST, COMPARED_STREAMS = 1.1, (64, 256)


@dataclass(frozen=True)
class Load:
    """What one run of the load command found: tokens a second, milliseconds."""

    tokens_per_second: float
    first_token_p50: float
    first_token_p99: float


def load(server: Running, dialect: str, streams: int, requests: int, tokens: int) -> Load:
    """Put the server under load from another process; every answer has to be whole."""
    command = [
        sys.executable, "-m", "lmi_vllm", "bench", server.url, "--dialect", dialect,
        "-c", str(streams), "-n", str(requests), "--output-tokens", str(tokens), "--ignore-eos",
        "--prompt-words", str(PROMPT_WORDS), "--temperature", "0", "--json", "-", "--quiet",
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    if found["good"] != requests or found["output_tokens"] != requests * tokens:
        raise AssertionError(found)
    first = found["latency_milliseconds"]["time_to_first_token"]
    return Load(found["output_tokens_per_second"], first["p50"], first["p99"])


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--levels", default="1,16,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    levels = [int(word) for word in given.levels.split(",")]
    with (
        floor() as bare,
        running(our_command, "/ping") as ours,
        running(their_command, "/health") as theirs,
        rust_front_end() as rust,
    ):
        lanes = {
            "ours: LMI": (ours, "lmi"),
            "ours: completions": (ours, "completions"),
            "vLLM: completions": (theirs, "completions"),
        }
        notes = [f"vllm-rs was not measured: {rust}"] if isinstance(rust, str) else []
        if not isinstance(rust, str):
            lanes[RUST] = (rust, "completions")
        found: dict[tuple[str, int], list[Load]] = defaultdict(list)
        for server, dialect in lanes.values():
            load(server, dialect, max(levels), max(levels), 8)  # warm up
        for _ in range(given.rounds):
            for streams in levels:
                for name, (server, dialect) in lanes.items():
                    one = load(server, dialect, streams, max(32, 2 * streams), given.tokens)
                    found[name, streams].append(one)
        added = _first_tokens(bare, lanes, SINGLE_ROUNDS)
        judged = {
            name: [by_their_client(server, given.tokens) for _ in range(given.rounds)]
            for name, (server, dialect) in lanes.items()
            if dialect == "completions"
        }
    result = _result(list(lanes), levels, found, added, given.tokens)
    title = f"The same by vLLM's own client, {THEIR_STREAMS} streams, output tokens per second"
    rows = [[name, spread(speeds)] for name, speeds in judged.items()]
    table = Table(title, ["server and lane", "median (least to most)"], rows)
    return replace(result, tables=[*result.tables, table], notes=notes)


def by_their_client(server: Running, tokens: int) -> float:
    """Return the output tokens a second that vLLM's benchmark client finds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "integration.bench.vllm_client", "--base-url", server.url,
            "--endpoint", "/v1/completions", "--backend", "openai", "--model", "lmi",
            "--tokenizer", str(DEMO_MODEL_DIR), "--dataset-name", "random",
            "--random-input-len", str(PROMPT_WORDS), "--random-output-len", str(tokens),
            "--ignore-eos", "--temperature", "0", "--num-prompts", str(4 * THEIR_STREAMS),
            "--max-concurrency", str(THEIR_STREAMS), "--save-result",
            "--result-dir", folder, "--result-filename", "found.json",
        ]  # fmt: skip
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_bytes())
    if found["failed"] or found["completed"] != 4 * THEIR_STREAMS:
        raise AssertionError(found)
    return float(found["output_throughput"])


def _first_tokens(
    bare: Floor, lanes: Mapping[str, tuple[Running, str]], rounds: int
) -> dict[str, list[float]]:
    """Return the median milliseconds to the first token of each round, one request at a time."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        found["bare engine"].append(bare.first_token(SINGLE_REQUESTS, PROMPT_WORDS))
        for name, (server, dialect) in lanes.items():
            found[name].append(first_token(server.url, dialect, SINGLE_REQUESTS, PROMPT_WORDS))
    return found


def _result(
    names: list[str],
    levels: list[int],
    found: Mapping[tuple[str, int], list[Load]],
    added: Mapping[str, list[float]],
    tokens: int,
) -> Result:
    def column(name: str, streams: int, what: str) -> list[float]:
        return [getattr(one, what) for one in found[name, streams]]

    def table(title: str, what: str) -> Table:
        rows = [[name, *(spread(column(name, n, what)) for n in levels)] for name in names]
        return Table(title, ["server and lane", *(f"{n} streams" for n in levels)], rows)

    def plot(title: str, unit: str, what: str) -> Plot:
        lines = {
            name: [(float(n), statistics.median(column(name, n, what))) for n in levels]
            for name in names
        }
        return Plot(title, "streams", unit, lines)

    most = max(levels)
    medians = {n: statistics.median(column(n, most, "tokens_per_second")) for n in names}
    bare = statistics.median(added["bare engine"])
    claims = [
        Claim(
            f"tokens/s of {name.removeprefix('ours: ')} at {most} streams / vLLM completions",
            medians[name] / medians["vLLM: completions"],
            1.0,
            is_at_least=True,
        )
        for name in names[:2]
    ] + [
        Claim(
            f"ms that {name.removeprefix('ours: ')} adds to the first token (p50, one stream)",
            statistics.median(added[name]) - bare,
            ADDED_MILLISECONDS,
        )
        for name in names[:2]
    ]
    claims += [
        Claim(
            f"ms to the first token at {n} streams (p50): {name.removeprefix('ours: ')} / vllm-rs",
            statistics.median(column(name, n, "first_token_p50"))
            / statistics.median(column(RUST, n, "first_token_p50")),
            BESIDE_RUST,
        )
        for n in COMPARED_STREAMS
        for name in names[:2]
        if (RUST, n) in found and (name, n) in found
    ]
    first = Table(
        f"Milliseconds to the first token, one request at a time ({SINGLE_REQUESTS} a round)",
        ["server and lane", "p50"],
        [[name, spread(values, 2)] for name, values in added.items()],
    )
    return Result(
        [
            table(f"Output tokens per second, answers of {tokens} tokens", "tokens_per_second"),
            table("Milliseconds to the first token, p50", "first_token_p50"),
            table("Milliseconds to the first token, p99", "first_token_p99"),
            first,
        ],
        claims,
        [
            plot(THROUGHPUT, "output tokens/s", "tokens_per_second"),
            plot("Time to first token, p50", "ms", "first_token_p50"),
        ],
    )
