"""One thread with an event loop of its own, for all code that users bring.

Such code may block: health checks, other requests' tokens and shutdown go on. It is a single
thread, so that code written for LMI's single event loop meets no more concurrency here.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, Final

logger = logging.getLogger(__name__)

_END: Final = object()


class CodeThread:
    """Runs functions and coroutines on one thread, which starts with the first and is a daemon."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result; its exceptions propagate.

        Cancelling the caller cancels a coroutine; a running function goes on.
        """
        call = _call(function, arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._started()))

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function later; its failure is logged."""
        running = asyncio.run_coroutine_threadsafe(_call(function, arguments), self._started())
        running.add_done_callback(_log_failure)

    async def iterate(self, items: Any) -> AsyncIterator[Any]:
        """Yield the items of an iterator, async or not, each computed on the thread."""
        try:
            while (item := await self.run(_next, items)) is not _END:
                yield item
        finally:
            close = getattr(items, "aclose", None) or getattr(items, "close", None)
            if close is not None:
                with contextlib.suppress(RuntimeError):  # its cancellation is still running
                    await self.run(close)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="custom-code", daemon=True).start()
        return self._loop


async def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        result = function(*arguments)
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:  # would end the loop
        raise RuntimeError(f"the code called exit ({error!r})") from error


def _log_failure(running: "Future[Any]") -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.warning("custom code failed", exc_info=error)


async def _next(items: Any) -> Any:
    if hasattr(items, "__anext__"):
        return await anext(items, _END)
    return next(items, _END)
