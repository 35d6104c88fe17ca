"""How much longer than on an idle machine something takes now: for tests of a promised time."""

import time
from typing import Final

WORK_SECONDS: Final = 0.02  # of processor time: several turns of the kernel's scheduler
# The shortest of 300 runs of `_work` on the machine of SECURITY.md's figures, 28 November 2026.
QUIET_SECONDS: Final = 0.0163


def slowdown() -> float:
    """Return the seconds of the clock that a second of the processor takes: 1.0, or more."""
    began, worked = time.monotonic(), time.thread_time()
    while (spent := time.thread_time() - worked) < WORK_SECONDS:
        pass
    return max(1.0, (time.monotonic() - began) / spent)


def processor_slowdown() -> float:
    """Return how much more processor time work takes than on a quiet machine: 1.0, or more.

    Others that use the caches and the other thread of a core made it 1.7 in the middle, and 2.5.
    """
    began = time.thread_time()
    _work()
    return max(1.0, (time.thread_time() - began) / QUIET_SECONDS)


def _work() -> None:
    rows = {}
    for number in range(100_000):
        rows[number & 1023] = (number, str(number))
