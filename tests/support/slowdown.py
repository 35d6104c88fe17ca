"""How much longer than on an idle machine something takes now: for tests of a promised time."""

import time
from typing import Final

WORK_SECONDS: Final = 0.02  # of processor time: several turns of the kernel's scheduler


def slowdown() -> float:
    """Return the seconds of the clock that a second of the processor takes: 1.0, or more."""
    began, worked = time.monotonic(), time.thread_time()
    while (spent := time.thread_time() - worked) < WORK_SECONDS:
        pass
    return max(1.0, (time.monotonic() - began) / spent)
