"""What a request costs that speaks to vLLM's engine core itself, beside one that goes through vLLM.

    python -m integration.bench direct [--streams 64] [--tokens 128] [--rounds 5] [--step-ms 40]

Two bare aiohttp servers in processes of their own, and ours. Both bare ones read the body, make
tokens of the prompt, and write LMI's rows; they check nothing, count nothing and log nothing. One
asks `AsyncLLM.generate`. The other sends an `EngineCoreRequest` and reads the engine's outputs.
The difference of the two is what vLLM's own part of the front end costs, and what a way around it
can save at most. The difference of ours to the first is what this server adds.
"""

import os
import statistics
import sys
from functools import partial
from typing import Final

from integration.bench.results import Result, Table, spread
from integration.bench.servers import STEP_VARIABLE, our_command, running
from integration.bench.tokens import LMI_PLAIN, SHORTER, cost, of_streams, parts

WAYS: Final = ("generate", "core")


def bare_command(way: str, port: int) -> list[str]:
    """Return the bare server that goes this way."""
    return [sys.executable, "-m", "integration.bench.direct_server", way, str(port)]


def main() -> Result:
    """Measure in turns."""
    given = of_streams(__doc__).parse_args()
    if given.step_ms:
        os.environ[STEP_VARIABLE] = str(given.step_ms)
    lengths = (given.tokens, given.tokens // SHORTER)
    found: dict[tuple[str, int], list[float]] = {}
    with (
        running(our_command, "/ping") as ours,
        running(partial(bare_command, WAYS[0]), "/ping") as generate,
        running(partial(bare_command, WAYS[1]), "/ping") as core,
    ):
        servers = {"ours": ours, "bare, AsyncLLM": generate, "bare, engine core": core}
        for round_number in range(given.rounds + 1):
            for name, server in servers.items():
                for length in lengths:
                    spent, _ = cost(server, LMI_PLAIN, given.streams, length)
                    if round_number:  # the first warms up
                        found.setdefault((name, length), []).append(spent)
    rows = []
    for name in servers:
        long, short = (found[name, length] for length in lengths)
        each = parts(statistics.median(long), statistics.median(short), given.tokens)
        rows.append([name, spread(long), *(f"{part:.1f}" for part in each)])
    title = f"CPU microseconds of the front end, {given.streams} streams of {given.tokens} tokens"
    return Result(
        [Table(title, ["way", "a token, all", "a request, once", "each token"], rows)], []
    )
