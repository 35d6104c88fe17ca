"""Failures within a time window: what turns `/ping` bad although the engine is alive."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lmi_vllm.errors import Fault, LmiError


class ErrorKind(StrEnum):
    """What an error counts towards: `any` counts both."""

    WORKLOAD = "error_rate_wlm"
    SERVER = "error_rate_server"
    ANY = "error_rate_any"


_SERVER_FAULTS = frozenset(
    {Fault.CLIENT, Fault.CUSTOM_CODE, Fault.ENGINE, Fault.DEADLINE, Fault.MEMORY}
)
_FIRST_SERVER_ERROR = 500
_FAILED_DEPENDENCY = 424


@dataclass(frozen=True, slots=True)
class ErrorRate:
    """`count` errors within `seconds` are too many."""

    count: int
    seconds: float


class ErrorRates:
    """Counts errors against limits; once one is reached it stays so until the process ends."""

    def __init__(
        self,
        limits: Mapping[ErrorKind, ErrorRate] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = dict(limits or {})
        self._now = now
        # No more times are kept than decide: the memory is bounded by the limits themselves.
        self._times = {kind: deque[float](maxlen=rate.count) for kind, rate in self._limits.items()}
        self.reached: ErrorKind | None = None

    def record(self, error: LmiError) -> None:
        """Count an error that a request was answered with; some faults count towards none."""
        if error.fault is Fault.OVERLOAD:
            self.count(ErrorKind.WORKLOAD)
        elif error.fault in _SERVER_FAULTS:
            self.count(ErrorKind.SERVER)

    def record_status(self, status: int) -> None:
        """Count an answer that has no error of ours behind it, by its status."""
        if status == _FAILED_DEPENDENCY or status >= _FIRST_SERVER_ERROR:
            self.count(ErrorKind.SERVER)

    def count(self, counted: ErrorKind) -> None:
        """Count one error of that kind."""
        for kind in (counted, ErrorKind.ANY):
            rate, times = self._limits.get(kind), self._times.get(kind)
            if rate is None or times is None:
                continue
            times.append(self._now())
            is_full = len(times) == rate.count
            if is_full and times[-1] - times[0] <= rate.seconds and self.reached is None:
                self.reached = kind


class ReportedErrors(ErrorRates):
    """Leaves the counting to the process that answers for health."""

    def __init__(self, report: Callable[[ErrorKind], None]) -> None:
        super().__init__()
        self._report = report

    def count(self, counted: ErrorKind) -> None:
        """Tell of one error."""
        self._report(counted)
