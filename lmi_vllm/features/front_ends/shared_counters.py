"""Counters in memory that all front-end processes share: slots of the queue, engine steps."""

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.engine.base import OtherClients
from lmi_vllm.inference.queue import QueueSlots

# Of each process: slots, running requests, engine steps, time of the last report (monotonic ns),
# requests whose numbers were not finite, slots that were ever taken; then the requests that have
# ended in it: answered, failed, left by their clients.
_FIELDS: Final = 9
_ENDS: Final = 6
_BYTES: Final = 8


class SharedCounters:
    """Counters in a small file that every front-end process maps, one row for each process.

    Every process writes its own row only, so no lock is needed; a sum may mix older and newer rows.
    """

    def __init__(self, path: Path, processes: int) -> None:
        """Map the file; a missing one is created with zeros."""
        size = processes * _FIELDS * _BYTES
        with path.open("a+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a hole on a full disk ends the process
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")

    def row(self, process: int) -> "CounterRow":
        """Return the row of the process with this index."""
        return CounterRow(self._numbers, process)

    def close(self) -> None:
        """Unmap the file; no row may be used afterwards."""
        self._numbers.release()
        self._map.close()


class CounterRow(OtherClients, QueueSlots):
    """The row that one process writes, and the sums over all rows."""

    def __init__(self, numbers: memoryview, process: int) -> None:
        self._numbers = numbers
        self._first = process * _FIELDS

    def add(self, count: int) -> int:
        """Take `count` slots of the queue, or release them with a number below 0; see `total`."""
        self._numbers[self._first] += count
        if count > 0:
            self._numbers[self._first + 5] += count
        return self.total

    @property
    def admitted(self) -> int:
        """Number of slots that all processes have ever taken."""
        return self._sum(5)

    @property
    def total(self) -> int:
        """Number of slots that all processes hold."""
        return self._sum(0)

    def report_engine(self, running: int, steps: int, not_finite: int = 0) -> None:
        """Write this process's running requests, engine steps and NaN count, with the time."""
        self._numbers[self._first + 1] = running
        self._numbers[self._first + 2] = steps
        self._numbers[self._first + 3] = time.monotonic_ns()  # one clock for all processes
        self._numbers[self._first + 4] = not_finite

    @property
    def silent_seconds(self) -> float:
        """Seconds since the process last reported."""
        return (time.monotonic_ns() - self._numbers[self._first + 3]) / 1e9

    @property
    def running_requests(self) -> int:
        """Number of requests that all processes have in the engine."""
        return self._sum(1)

    @property
    def steps(self) -> int:
        """Sum of the engine steps that processes have seen; grows while the engine progresses."""
        return self._sum(2)

    @property
    def not_finite(self) -> int:
        """Number of requests to the base model with NaN or infinite logits, over all processes."""
        return self._sum(4)

    def add_ends(self, ends: Sequence[int]) -> None:
        """Add requests that have ended in this process: see `RequestTotals.take`."""
        for field, count in enumerate(ends, self._first + _ENDS):
            self._numbers[field] += count

    @property
    def ends(self) -> Sequence[int]:
        """Requests that have ended, as `add_ends` has them, over all processes."""
        return [self._sum(field) for field in range(_ENDS, _FIELDS)]

    def clear(self) -> None:
        """Release the slots of a process that has ended, whose requests have failed; sums stay."""
        self.add_ends((0, self._numbers[self._first], 0))
        self._numbers[self._first] = self._numbers[self._first + 1] = 0

    def _sum(self, field: int) -> int:
        return sum(self._numbers[field::_FIELDS])
