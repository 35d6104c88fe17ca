"""A worker that is killed before it is ready is named, with its signal.

vLLM's engine core reads the end of the worker's pipe, and raises an exception that points to a
stack trace. A process that the kernel has killed has none.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: "WorkerProc initialization failed due to an exception in a background process" of a worker
that ran out of memory.
May go: when test_plain_vllm_does_not_say_how_a_process_ended fails.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from lmi_vllm.engine.deaths import how_ended

_END_SECONDS: Final = 1.0  # from the end of a pipe to that of its process
_POLL_SECONDS: Final = 0.01


def named(wait_for_ready: Callable[[list[Any]], list[Any]]) -> Any:
    """Return `wait_for_ready` with the name and the signal of a worker that was killed."""

    def wait(unready: list[Any]) -> list[Any]:
        processes = [handle.proc for handle in unready]
        try:
            return wait_for_ready(unready)
        except Exception as error:
            if (killed := _killed(processes)) is not None:
                text = f"its worker {killed.name} was {how_ended(killed.exitcode)}"
                raise RuntimeError(text) from error
            raise

    return staticmethod(wait)


def _killed(processes: Sequence[Any]) -> Any:
    """Return the process that a signal has ended; None if the first to end had none."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline:
        ended = [one for one in processes if one.exitcode is not None]
        if ended:
            return next((one for one in ended if one.exitcode < 0), None)
        time.sleep(_POLL_SECONDS)
    return None
