"""Starts the floor (`integration.bench.floor`) and asks it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from integration.bench.servers import QUIET, stop


class Floor:
    """The process that consumes the engine without HTTP."""

    def __init__(self, process: "subprocess.Popen[bytes]", answers: IO[str]) -> None:
        self._process = process
        self._answers = answers

    def cost(self, streams: int, tokens: int, logprobs: int | None = None) -> tuple[float, float]:
        """Return its CPU microseconds per token; it has no rows, so 1 token in each."""
        return self._ask(f"cost {streams} {tokens} {-1 if logprobs is None else logprobs}"), 1.0

    def first_token(self, requests: int, words: int) -> float:
        """Return the median milliseconds to the first token of requests one after another."""
        return self._ask(f"first {requests} {words} -1")

    def _ask(self, question: str) -> float:
        if self._process.stdin is None:
            raise AssertionError("no stdin")
        self._process.stdin.write(question.encode() + b"\n")
        self._process.stdin.flush()
        return float(self._answers.readline())


@contextmanager
def floor() -> Iterator[Floor]:
    """Start the floor, wait until its engine is up, end it."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "integration.bench.floor", str(write_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[write_end],
        start_new_session=True,
        env=dict(os.environ) | dict(QUIET),
    )
    os.close(write_end)
    with os.fdopen(read_end) as answers:
        try:
            if answers.readline().strip() != "ready":
                raise SystemExit("the floor did not start")
            yield Floor(process, answers)
        finally:
            stop(process)
