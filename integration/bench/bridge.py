"""CPU of the front-end process per request that is handed to vLLM's own HTTP application.

    python -m integration.bench bridge [--rounds 9] [--requests 300]

Ours, which calls that application in process, against vLLM's server, which has it behind uvicorn:
on the same engine arguments and at once, in turns. Engine cores and the client do not count.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

from integration.bench.requests import TOKENS, cost
from integration.bench.results import Claim, Result, Table, spread
from integration.bench.servers import PROMPT, our_command, running, their_command

LIMIT: Final = 1.1  # of vLLM's own server
LONG: Final = 64  # tokens of a stream
MODEL: Final[dict[str, Any]] = {"model": "lmi", "temperature": 0}
MESSAGES: Final = [{"role": "user", "content": PROMPT}]
CALLS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "tokenize": ("/tokenize", {"model": "lmi", "prompt": PROMPT}),
    "messages": ("/v1/messages", MODEL | {"messages": MESSAGES, "max_tokens": TOKENS}),
    "messages, streamed": (
        "/v1/messages",
        MODEL | {"messages": MESSAGES, "max_tokens": LONG, "stream": True},
    ),
    "responses": ("/v1/responses", MODEL | {"input": PROMPT, "max_output_tokens": TOKENS}),
    "responses, streamed": (
        "/v1/responses",
        MODEL | {"input": PROMPT, "max_output_tokens": LONG, "stream": True},
    ),
}


def main() -> Result:
    """Measure in turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=300)
    given = parser.parse_args()
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with running(our_command, "/ping") as ours, running(their_command, "/health") as theirs:
        servers = {"ours": ours, "vLLM": theirs}
        for turn in range(given.rounds + 1):
            for name, (path, body) in CALLS.items():
                for label, server in servers.items():
                    spent = cost(server, path, body, given.requests)
                    if turn:  # the first warms up
                        found[name, label].append(spent)
    ratios = {
        name: statistics.median(found[name, "ours"]) / statistics.median(found[name, "vLLM"])
        for name in CALLS
    }
    rows = [
        [name, *(spread(found[name, label], 0) for label in servers), f"{ratios[name]:.2f}"]
        for name in CALLS
    ]
    title = "CPU microseconds of the front end per request, median (least to most)"
    return Result(
        [Table(title, ["route", *servers, "ours / vLLM"], rows)],
        [Claim(f"CPU per {name}, ours / vLLM", ratios[name], LIMIT) for name in CALLS],
    )
