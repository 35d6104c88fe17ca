"""The time of the process: what waits for seconds takes them from here, and a test decides.

Also how long its end may take, all of it in one place.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

# How long the parts of an end may take, in seconds; beside them `shutdown_timeout`, which is set.
FAILURE_ANSWER_SECONDS: Final = 10.0  # for requests in flight, when the engine has failed for good
LAST_WORD_SECONDS: Final = 2.0  # for requests that were cut off to be answered so
ENGINE_CLOSE_SECONDS: Final = 8.0
CONNECTION_CLOSE_SECONDS: Final = 1.0
LAST_LINES_SECONDS: Final = 2.0  # for the log, whose reader may be slow


class Clock:
    """Seconds that pass by themselves; a test's clock overrides `now` and `sleep`."""

    def now(self) -> float:
        """Return seconds since an arbitrary moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return when that much time has passed."""
        await asyncio.sleep(seconds)

    async def limit(self, seconds: float | None, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns; cancelled and waited for when it takes longer.

        Raises:
            TimeoutError: the seconds are over; never with None.
        """
        if seconds is None:
            return await work
        task, timer = asyncio.ensure_future(work), asyncio.ensure_future(self.sleep(seconds))
        try:
            await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise TimeoutError
            return task.result()
        finally:
            for each in (task, timer):
                each.cancel()
            await asyncio.gather(task, timer, return_exceptions=True)
