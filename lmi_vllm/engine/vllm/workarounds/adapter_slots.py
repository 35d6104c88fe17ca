"""Which adapters may be in the engine at once, so that no step ever needs one slot too many.

vLLM's scheduler counts the distinct adapters of a step against `max_loras`, but not the slots that
pinned adapters hold: a step with more distinct adapters than free slots evicts one of its own.

A pinned adapter that is replaced leaves its slot to its successor. The slot is the old one's until
its last request has ended, unless another slot is free for those requests.

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
        # The slots of pinned adapters. The first adapter of each has it now, then its successors.
        self._pinned: list[list[int]] = []
        self._ended: set[int] = set()  # those before a successor that get no further request
        self._reserved = 0  # slots that a running pin waits for
        self._running: Counter[int] = Counter()
        self._waiting: deque[_Waiter] = deque()
        self._changed = asyncio.Event()

    @property
    def is_all_pinned(self) -> bool:
        """Whether no slot is left for an adapter that is not pinned."""
        return len(self._pinned) >= self.count

    def is_pinned(self, adapter: int) -> bool:
        """Whether the adapter is pinned, and has no successor."""
        return any(slot[-1] == adapter for slot in self._pinned)

    def is_alone(self, adapter: int) -> bool:
        """Whether the adapter is pinned, and has a slot that no other adapter uses."""
        return [adapter] in self._pinned

    def may_have_slot(self, adapter: int) -> bool:
        """Whether requests of the adapter may run, now or once a slot is free."""
        return not self.is_all_pinned or self._slot_of(adapter) is not None

    @property
    def taken(self) -> frozenset[int]:
        """The adapters that have a slot: those of running requests, and the pinned ones."""
        return frozenset({*self._running, *(slot[0] for slot in self._pinned)})

    @property
    def awaited(self) -> frozenset[int]:
        """The adapters that requests wait for."""
        return frozenset(waiter.adapter for waiter in self._waiting)

    @property
    def queued(self) -> int:
        """Number of requests that wait for a slot, which vLLM's scheduler does not know of."""
        return len(self._waiting)

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
            self._release(adapter)

    async def pin(self, adapter: int, timeout_seconds: float) -> None:
        """Give the adapter a slot of its own, once a slot is free.

        Raises:
            NoSlotError: every slot is pinned, or none got free in time.
        """
        if self.is_pinned(adapter):
            return
        if len(self._pinned) + self._reserved >= self.count:
            raise NoSlotError
        self._reserved += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                while self._room(adapter) < 0:
                    self._changed.clear()
                    await self._changed.wait()
            self._pinned.append([adapter])
        except TimeoutError:
            raise NoSlotError from None
        finally:
            self._reserved -= 1
            self._grant()

    def succeed(self, adapter: int, old: int) -> None:
        """Give the adapter the slot of the pinned one that it replaces, once that is free."""
        slot = next(slot for slot in self._pinned if slot[-1] == old)
        slot.append(adapter)
        self._grant()

    def unpin(self, adapter: int) -> None:
        """Release the slot of a pinned adapter; with a successor after its running requests."""
        for slot in [slot for slot in self._pinned if adapter in slot]:
            if slot[0] == adapter and len(slot) > 1:
                self._ended.add(adapter)
                continue
            slot.remove(adapter)
            if not slot or slot[-1] in self._ended:
                self._ended.difference_update(slot)
                self._pinned.remove(slot)
        self._grant()

    def _slot_of(self, adapter: int) -> list[int] | None:
        return next((slot for slot in self._pinned if adapter in slot), None)

    def _room(self, adapter: int | None = None) -> int:
        """Slots that are neither pinned, nor reserved for a pin, nor used by others."""
        others = sum(item != adapter and self._slot_of(item) is None for item in self._running)
        return self.count - len(self._pinned) - self._reserved - others

    def _fits(self, adapter: int) -> bool:
        if (slot := self._slot_of(adapter)) is not None:
            return slot[0] == adapter
        return adapter in self._running or self._room() > 0

    async def _acquire(self, adapter: int) -> None:
        if not self.may_have_slot(adapter):
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
                self._release(adapter)
            self._grant()
            raise

    def _may_pass(self, adapter: int) -> bool:
        if self._slot_of(adapter) is not None or not self._waiting:
            return self._fits(adapter)
        is_patient = self._clock() - self._waiting[0].since < OVERTAKE_SECONDS
        return is_patient and adapter in self._running

    def _release(self, adapter: int) -> None:
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]
        self._grant()

    def _grant(self) -> None:
        """Admit waiters in order while they fit; fail those that can never get a slot."""
        self._pass_on()
        self._changed.set()
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if waiter.granted.done():  # cancelled
                continue
            if self._fits(waiter.adapter):
                self._running[waiter.adapter] += 1
                waiter.granted.set_result(None)
            elif not self.may_have_slot(waiter.adapter):
                waiter.granted.set_exception(NoSlotError())
            else:
                self._waiting.append(waiter)

    def _pass_on(self) -> None:
        """Give slots to successors: the old adapters are out, or fit into other slots."""
        for slot in self._pinned:
            while len(slot) > 1:
                is_out = slot[0] in self._ended and slot[0] not in self._running
                if not is_out and self._room() < 1:
                    break
                self._ended.discard(slot.pop(0))
