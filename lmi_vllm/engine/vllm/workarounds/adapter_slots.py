"""Which adapters may be in the engine at once, so that no step ever needs one slot too many.

vLLM's scheduler counts the distinct adapters of a step against `max_loras`, but not the slots that
pinned adapters hold: a step with more distinct adapters than free slots evicts one of its own.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: the engine ends, or an answer of another adapter.
May go: when test_all_slots_pinned_refuses_the_next_adapter and
    test_pin_in_place_keeps_weights_and_waits_for_running_requests hold without it.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

# How long requests of adapters with a slot may be admitted before one that waits for a slot.
OVERTAKE_SECONDS: Final = 1.0


class NoSlotError(Exception):
    """Every slot is pinned, or in use for longer than the caller waits."""


@dataclass(slots=True)
class _Waiter:
    adapter: int
    since: float
    granted: asyncio.Future[None]


class AdapterSlots:
    """Admits requests while their adapters fit into `count` slots, pinned adapters included."""

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = count
        self._clock = clock
        self._pinned: set[int] = set()
        self._reserved = 0  # slots that a running pin waits for
        self._running: Counter[int] = Counter()
        self._waiting: deque[_Waiter] = deque()
        self._released = asyncio.Condition()

    @property
    def is_all_pinned(self) -> bool:
        """Whether no slot is left for an adapter that is not pinned."""
        return len(self._pinned) >= self.count

    def is_pinned(self, adapter: int) -> bool:
        """Whether the adapter is pinned."""
        return adapter in self._pinned

    @property
    def taken(self) -> frozenset[int]:
        """The adapters that have a slot: those of running requests, and the pinned ones."""
        return frozenset({*self._running, *self._pinned})

    @property
    def awaited(self) -> frozenset[int]:
        """The adapters that requests wait for."""
        return frozenset(waiter.adapter for waiter in self._waiting)

    def running(self, adapter: int) -> int:
        """Number of running requests on the adapter."""
        return self._running[adapter]

    @contextlib.asynccontextmanager
    async def hold(self, adapter: int) -> AsyncIterator[None]:
        """Wait for a slot, in order, and keep it while the body runs.

        Raises:
            NoSlotError: every slot is pinned.
        """
        await self._acquire(adapter)
        try:
            yield
        finally:
            await self._release(adapter)

    async def pin(self, adapter: int, timeout_seconds: float) -> None:
        """Give the adapter a slot of its own, once a slot is free.

        Raises:
            NoSlotError: every slot is pinned, or none got free in time.
        """
        if adapter in self._pinned:
            return
        if len(self._pinned) + self._reserved >= self.count:
            raise NoSlotError
        self._reserved += 1
        try:
            async with asyncio.timeout(timeout_seconds), self._released:
                await self._released.wait_for(lambda: self._room(adapter) >= 0)
            self._pinned.add(adapter)
        except TimeoutError:
            raise NoSlotError from None
        finally:
            self._reserved -= 1
            self._grant()

    def unpin(self, adapter: int) -> None:
        """Release the slot of a pinned adapter."""
        self._pinned.discard(adapter)
        self._grant()

    def _room(self, adapter: int | None = None) -> int:
        """Slots that are neither pinned, nor reserved for a pin, nor used by others."""
        others = sum(item not in self._pinned and item != adapter for item in self._running)
        return self.count - len(self._pinned) - self._reserved - others

    def _fits(self, adapter: int) -> bool:
        if adapter in self._pinned or adapter in self._running:
            return True
        return self._room() > 0

    async def _acquire(self, adapter: int) -> None:
        if adapter not in self._pinned and self.is_all_pinned:
            raise NoSlotError
        if self._may_pass(adapter):
            self._running[adapter] += 1
            return
        waiter = _Waiter(adapter, self._clock(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.granted.cancelled() and waiter.granted.exception() is None:
                await self._release(adapter)
            self._grant()
            raise

    def _may_pass(self, adapter: int) -> bool:
        if adapter in self._pinned or not self._waiting:
            return self._fits(adapter)
        is_patient = self._clock() - self._waiting[0].since < OVERTAKE_SECONDS
        return is_patient and adapter in self._running

    async def _release(self, adapter: int) -> None:
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
        self._grant()
        async with self._released:
            self._released.notify_all()

    def _grant(self) -> None:
        """Admit waiters in order while they fit; fail those that can never get a slot."""
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if waiter.granted.done():  # cancelled
                continue
            if self._fits(waiter.adapter):
                self._running[waiter.adapter] += 1
                waiter.granted.set_result(None)
            elif self.is_all_pinned:
                waiter.granted.set_exception(NoSlotError())
            else:
                self._waiting.append(waiter)
