"""Processes that fetch a model, to be killed in the middle or to meet another."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CODE = (
    "import os, sys; from lmi_vllm.assembly import configuration; "
    "from lmi_vllm.sources.base import FetchRequest; "
    "print(configuration().sources.fetch_model(FetchRequest(sys.argv[1], os.environ)))"
)


@contextmanager
def fetching(reference: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that fetches `reference`."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, reference], env=environ, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return once `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
