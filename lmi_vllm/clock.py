"""The injected clock, and what measures time: everything that waits uses it, so tests control it.

The time limits of a shutdown are here, too.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

# Time limits of a shutdown's parts in seconds, besides the configured `shutdown_timeout`.
FAILURE_ANSWER_SECONDS: Final = 10.0  # for requests in flight, once the engine has failed for good
FAILURE_REASON_SECONDS: Final = 1.5  # until it is known why an engine has died
CUT_OFF_ANSWER_SECONDS: Final = 2.0  # for the error answers of requests that are cut off
ENGINE_CLOSE_SECONDS: Final = 8.0
CONNECTION_CLOSE_SECONDS: Final = 1.0
LOG_FLUSH_SECONDS: Final = 2.0  # for the log, whose reader may be slow


class Clock:
    """Seconds that pass by themselves; a test's clock overrides `now` and `sleep`."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds."""
        await asyncio.sleep(seconds)

    async def limit(self, seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of `coroutine`; it is cancelled, and waited for, when it takes longer.

        Raises:
            TimeoutError: `seconds` have passed; never with None.
        """
        if seconds is None:
            return await coroutine
        task, timer = asyncio.ensure_future(coroutine), asyncio.ensure_future(self.sleep(seconds))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            for each in (task, timer):
                each.cancel()
            await asyncio.gather(task, timer, return_exceptions=True)


class Laps:
    """Seconds spent in each of several parts of a time, one after the other."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spent: dict[str, float] = {}
        self._running = ""
        self._began = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each part, the running one included."""
        if not self._running:
            return dict(self._spent)
        running = self._now() - self._began
        return {**self._spent, self._running: self._spent.get(self._running, 0.0) + running}

    def enter(self, name: str) -> None:
        """Begin a part, which may have been entered before; none with an empty name."""
        self._spent, self._running, self._began = dict(self.seconds), name, self._now()

    def clear(self) -> None:
        """Forget all of it."""
        self._spent, self._running = {}, ""
