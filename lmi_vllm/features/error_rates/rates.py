"""Error rates over a time window, which make `/ping` 503 although the engine is alive."""

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from lmi_vllm.config.options.row import SERVER_LEVEL, option, ours
from lmi_vllm.config.settings import FeatureSettings, Settings
from lmi_vllm.errors import Fault

if TYPE_CHECKING:
    from lmi_vllm.inference.service import InferenceService
    from lmi_vllm.server.context import ServerEvents

logger = logging.getLogger(__name__)

_UNIT_SECONDS: Final[Mapping[str, int]] = MappingProxyType(
    {"plain": 1, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
)
_ERROR_RATE: Final = re.compile(
    r"(?P<count>\d{1,6})"
    r"(?:/(?:(?P<plain>\d{1,9}(?:\.\d{1,3})?)"
    r"|P(?:(?P<days>\d{1,5})D)?(?:T(?=\d)(?:(?P<hours>\d{1,6})H)?(?:(?P<minutes>\d{1,8})M)?"
    r"(?:(?P<seconds>\d{1,9}(?:\.\d{1,3})?)S)?)?))?",
    re.IGNORECASE | re.ASCII,
)


def error_rate(text: str) -> tuple[int, float]:
    """Return errors and seconds of `count/duration` (one minute when the duration is left out).

    The duration is ISO 8601 as upstream reads it (`PT1M`, `P1DT2H`), or plain seconds.

    Raises:
        ValueError: it cannot be parsed, or is zero.
    """
    match = _ERROR_RATE.fullmatch(text.strip())
    parts = match.groupdict() if match else {}
    count = int(parts.pop("count", None) or 0)
    lengths = (float(parts[unit] or 0) * _UNIT_SECONDS[unit] for unit in parts)
    length = sum(lengths) if "/" in text else 60.0
    if not count or not length:
        raise ValueError("a number of errors and a time is needed, such as 5/PT1M or 5/60")
    return count, length


def error_rate_text(text: str) -> str:
    """Return the text of an error rate that can be parsed; raises `ValueError` otherwise."""
    error_rate(text)
    return text.strip()


def _window() -> str | None:
    """Return a field for an error rate, which makes /ping 503."""
    return option(
        error_rate_text,
        ours(),
        values="`5/PT1M`, `5/60`",
        written=SERVER_LEVEL,
        note="After this many failures within this time /ping is 503 until a restart.",
    )


class ErrorRateSettings(FeatureSettings):
    """How many failures within how long are too many, by their kind."""

    section: ClassVar[str] = "Server"

    error_rate_wlm: str | None = _window()
    error_rate_server: str | None = _window()
    error_rate_any: str | None = _window()


@contextlib.asynccontextmanager
async def counting_errors(
    service: "InferenceService",
    settings: Settings,
    _: Mapping[str, str],
    events: "ServerEvents",
) -> AsyncIterator[None]:
    """Count the faults of answers, in the process that serves `/ping`."""
    asked = settings.feature(ErrorRateSettings)
    texts = {
        ErrorKind.WORKLOAD: asked.error_rate_wlm,
        ErrorKind.SERVER: asked.error_rate_server,
        ErrorKind.ANY: asked.error_rate_any,
    }
    limits = {kind: ErrorRate(*error_rate(text)) for kind, text in texts.items() if text}

    def mark(kind: ErrorKind) -> None:
        reason = f"there were too many errors (SERVING_{kind.upper()}={texts[kind]})"
        logger.error("%s: /ping is 503 until a restart", reason)
        service.lifecycle.mark_unhealthy(reason)

    if limits and events.is_first:
        service.lifecycle.on_failure.append(ErrorRates(limits, mark).note)
    yield


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
    """Counts failures against limits; once one is reached it stays so until the process ends."""

    def __init__(
        self,
        limits: Mapping[ErrorKind, ErrorRate],
        on_reached: Callable[[ErrorKind], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = dict(limits)
        self._on_reached = on_reached
        self._now = now
        # No more times are kept than decide: the memory is bounded by the limits themselves.
        self._times = {kind: deque[float](maxlen=rate.count) for kind, rate in self._limits.items()}
        self.reached: ErrorKind | None = None

    def note(self, cause: Fault | int) -> None:
        """Count the fault of an answer, or its status; some count towards none."""
        if isinstance(cause, int):
            is_server_fault = cause == _FAILED_DEPENDENCY or cause >= _FIRST_SERVER_ERROR
        else:
            is_server_fault = cause in _SERVER_FAULTS
        if cause is Fault.OVERLOAD:
            self.count(ErrorKind.WORKLOAD)
        elif is_server_fault:
            self.count(ErrorKind.SERVER)

    def count(self, counted: ErrorKind) -> None:
        """Count one failure of that kind."""
        for kind in (counted, ErrorKind.ANY):
            rate, times = self._limits.get(kind), self._times.get(kind)
            if rate is None or times is None:
                continue
            times.append(self._now())
            is_full = len(times) == rate.count
            if is_full and times[-1] - times[0] <= rate.seconds and self.reached is None:
                self.reached = kind
                self._on_reached(kind)
