"""CPU time of another process, as exact as the kernel knows it."""

import time
from typing import Final

import psutil

_SCHEDULED: Final = 2  # CPUCLOCK_SCHED of Linux: what all threads of the process ran, in ns


def cpu_seconds(pid: int) -> float:
    """Return what a process has spent so far, ended threads included.

    psutil counts in ticks of 10 ms, which is some percent of what is compared here; it serves where
    there is no such clock (clock_getcpuclockid(3) makes the same number).
    """
    try:
        return time.clock_gettime(~pid << 3 | _SCHEDULED)
    except OSError:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
