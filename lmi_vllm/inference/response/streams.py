"""Streams that own what their request holds, and that end on time."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from lmi_vllm.errors import DeadlineError, LmiError

Item = TypeVar("Item")


class RowSink(Protocol):
    """Where a stream's rows go, of themselves once connected."""

    @property
    def is_ready(self) -> bool:
        """Whether a row may be written without waiting."""
        ...

    def put(self, row: bytes) -> None:
        """Take a row; only while it is ready."""
        ...


class DirectStream(AsyncIterator[bytes]):
    """Rows of which some go to a sink by themselves while somebody waits for the next one."""

    def __init__(self, rows: AsyncIterator[bytes], connect: Callable[[RowSink], None]) -> None:
        self._rows = rows
        self.connect = connect

    async def __anext__(self) -> bytes:
        return await anext(self._rows)

    async def aclose(self) -> None:
        """Abort what still runs."""
        await close_iterator(self._rows)


class HeldStream(AsyncIterator[bytes]):
    """A byte stream that releases its request's resources when closed, started or not.

    A generator that was never started runs none of its `finally` blocks: a client that goes away
    between the status line and the first byte would keep its place in the queue for ever.
    """

    def __init__(self, rows: AsyncIterator[bytes], resources: contextlib.AsyncExitStack) -> None:
        self._rows = rows
        self._resources = resources

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._rows)

    def connect(self, sink: RowSink) -> None:
        """Let rows go to `sink` by themselves where the stream can do that."""
        if isinstance(self._rows, DirectStream):
            self._rows.connect(sink)

    async def aclose(self) -> None:
        """Abort what still runs and release everything; may be called twice."""
        try:
            await close_iterator(self._rows)
        finally:
            await self._resources.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


async def close_iterator(iterator: AsyncIterator[Item]) -> None:
    """Close an async generator; iterators without `aclose` need none."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class SilenceLimit:
    """Ends the wait for a stream's next item when it takes too long.

    One timer serves the whole stream, looking again at the end of each span whether it is still the
    same wait: arming one for each item would cost a tenth of what a token costs. `seconds` and
    `setting` may be changed between waits.
    """

    def __init__(self, seconds: float, setting: str) -> None:
        self.seconds = seconds
        self.setting = setting
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the wait under way has taken too long
        self.is_waiting = False  # somebody, for the next item
        self._task: asyncio.Task[Any] | None = None
        self._is_over = False

    async def next(self, items: AsyncIterator[Item]) -> Item | None:
        """Return the next item, None at the end.

        Raises:
            DeadlineError: nothing came in time; the text names the setting.
        """
        self._task = task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        self._due = self._loop.time() + self.seconds
        self.is_waiting = True
        if self._timer is None or self._timer.when() > self._due:
            self._arm()
        try:
            return await anext(items, None)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            self._is_over = False
            if task is not None and task.uncancel() > cancels:  # others want its end too
                raise
            raise deadline_error(self.seconds, self.setting) from None
        finally:
            self._due = math.inf
            self.is_waiting = False

    def extend(self) -> None:
        """Begin the wait under way anew: something came another way."""
        self._due = self._loop.time() + self.seconds

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self.close()
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is math.inf:  # nobody waits: the next wait arms it again
            return
        if self._loop.time() < self._due:
            self._arm()
        elif self._task is not None:
            self._is_over = True
            self._task.cancel()


async def next_within(items: AsyncIterator[Item], seconds: float, setting: str) -> Item | None:
    """Return the next item, None at the end; see `SilenceLimit.next`."""
    limit = SilenceLimit(seconds, setting)
    try:
        return await limit.next(items)
    finally:
        limit.close()


async def gathered(works: Sequence[Coroutine[Any, Any, Item]]) -> list[Item]:
    """Return all results, in order; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except* LmiError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def deadline_error(seconds: float, setting: str) -> DeadlineError:
    """Return the error for a time limit that expired."""
    return DeadlineError(f"no answer within {seconds:g} s ({setting})")
