"""Streams that own what their request holds, and that end on time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from lmi_vllm.errors import DeadlineError, LmiError

Item = TypeVar("Item")


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


async def next_within(items: AsyncIterator[Item], seconds: float, setting: str) -> Item | None:
    """Return the next item, None at the end.

    Raises:
        DeadlineError: nothing came within `seconds`; the text names `setting`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await anext(items, None)
    except TimeoutError:
        raise deadline_error(seconds, setting) from None


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
