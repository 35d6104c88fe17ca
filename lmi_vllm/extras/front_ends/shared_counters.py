"""Numbers that all front-end processes of one server share: slots of the queue, engine steps."""

import mmap
import time
from pathlib import Path
from typing import Final

# Of each process: slots, running requests, steps of the engine, last sign, requests not finite.
_FIELDS: Final = 5
_BYTES: Final = 8


class SharedCounters:
    """Numbers that all front-end processes of one server see: a small file, mapped by each.

    Every process writes its own row only, so that nothing has to be locked; sums are of the moment.
    """

    def __init__(self, path: Path, processes: int) -> None:
        """Map the file, which is made with zeros where it is missing."""
        size = processes * _FIELDS * _BYTES
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._numbers = memoryview(self._map).cast("q")

    def row(self, process: int) -> "CounterRow":
        """Return what the process with this index writes."""
        return CounterRow(self._numbers, process)

    def close(self) -> None:
        """Give the memory back; no row can be used any more."""
        self._numbers.release()
        self._map.close()


class CounterRow:
    """The row that one process writes, and the sums over all rows."""

    def __init__(self, numbers: memoryview, process: int) -> None:
        self._numbers = numbers
        self._first = process * _FIELDS

    def add(self, count: int) -> None:
        """Take slots, or give them back with a number below 0."""
        self._numbers[self._first] += count

    @property
    def total(self) -> int:
        """Slots that all processes hold."""
        return self._sum(0)

    def report_engine(self, running: int, steps: int, not_finite: int = 0) -> None:
        """Write this process's running requests, engine steps and NaN count, with the time."""
        self._numbers[self._first + 1] = running
        self._numbers[self._first + 2] = steps
        self._numbers[self._first + 3] = time.monotonic_ns()  # one clock for all processes
        self._numbers[self._first + 4] = not_finite

    @property
    def silent_seconds(self) -> float:
        """Since the process last reported."""
        return (time.monotonic_ns() - self._numbers[self._first + 3]) / 1e9

    @property
    def running_requests(self) -> int:
        """Requests that the processes which report have in the engine."""
        return self._sum(1)

    @property
    def steps(self) -> int:
        """Sum of the engine steps that processes have seen; grows while the engine progresses."""
        return self._sum(2)

    @property
    def not_finite(self) -> int:
        """Requests of the model itself whose numbers were not finite, as they have seen."""
        return self._sum(4)

    def clear(self) -> None:
        """Forget a process that has ended: what it held is free. Its steps stay."""
        self._numbers[self._first] = self._numbers[self._first + 1] = 0

    def _sum(self, field: int) -> int:
        return sum(self._numbers[field::_FIELDS])
