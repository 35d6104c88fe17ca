"""Whose grammar is tried next: a few at a time, and no source in the way of the others.

A trial may take its whole time limit. So that who asks for many does not make others wait, one
source (a key, or a client's address) never has all places, and what becomes free goes to the one
that has the fewest, and of these to the one that was served the longest ago.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

AT_ONCE: Final = 3  # children; more would only slow each other down
OF_ONE_SOURCE: Final = 2  # of these


@dataclass(eq=False, slots=True)
class _Waiting:
    source: str
    turn: "asyncio.Future[None]"


@dataclass(slots=True)
class FairPlaces:
    """So many places, and who waits for one."""

    running: "Counter[str]" = field(default_factory=Counter)
    _waiting: list[_Waiting] = field(default_factory=list)
    _served: dict[str, int] = field(default_factory=dict)  # sources, by when they had a place
    _count: int = 0

    @contextlib.asynccontextmanager
    async def hold(self, source: str) -> AsyncIterator[None]:
        """Wait for a place and have it while the body runs."""
        mine = _Waiting(source, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        self._admit()
        try:
            await mine.turn
            yield
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._release(source)

    def _release(self, source: str) -> None:
        self.running[source] -= 1
        if not self.running[source]:
            del self.running[source]
        self._admit()
        if not self._waiting and not self.running:
            self._served.clear()

    def _admit(self) -> None:
        while self.running.total() < AT_ONCE:
            able = [one for one in self._waiting if self.running[one.source] < OF_ONE_SOURCE]
            if not able:
                return
            first = min(able, key=lambda one: (self.running[one.source], self._turn(one.source)))
            self._waiting.remove(first)
            self._count += 1
            self._served[first.source] = self._count
            self.running[first.source] += 1
            first.turn.set_result(None)

    def _turn(self, source: str) -> int:
        return self._served.get(source, 0)


@dataclass(slots=True)
class SharedTask:
    """A task that goes on as long as one of those who wait for it."""

    work: Coroutine[Any, Any, str]
    _task: "asyncio.Task[str] | None" = None
    _waiters: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was given up."""
        return self._task is not None and (self._task.done() or bool(self._task.cancelling()))

    async def result(self) -> str:
        """Return what it comes to; the last one that leaves ends it."""
        if self._task is None:
            self._task = asyncio.create_task(self.work)
        self._waiters += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._task.cancel()
