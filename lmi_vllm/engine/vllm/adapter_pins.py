"""Pinned adapters: each has a slot of its own, and in the engine it is never evicted.

An adapter is pinned in the engine only while no other adapter may need its slot: with one pinned
adapter too many, a step finds no slot and ends the engine. This module imports no vLLM.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

from lmi_vllm.engine.vllm.engine_calls import EngineCalls, LoadedAdapter, WorkerRefusalError
from lmi_vllm.engine.vllm.workarounds.adapter_slots import AdapterSlots, NoSlotError
from lmi_vllm.engine.vllm.workarounds.ignored_modules import Refusal
from lmi_vllm.errors import AdapterCapacityError
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

PIN_WAIT_SECONDS: Final = 10.0  # that a pin waits for a free slot
_PIN_ATTEMPTS: Final = 3  # a step of the engine may evict the adapter between load and pin


class AdapterPins:
    """Pins loaded adapters in `slots` and in the engine; `find` returns them by their ids."""

    def __init__(
        self, calls: EngineCalls, slots: AdapterSlots, find: Callable[[int], LoadedAdapter | None]
    ) -> None:
        self._calls = calls
        self._slots = slots
        self._find = find
        self._lock = asyncio.Lock()  # of calls that pin or unpin in the engine
        self._in_engine: set[int] = set()
        self._awaited: set[int] = set()  # to be pinned in the engine once their slot is theirs

    async def pin(self, adapter: LoadedAdapter) -> None:
        """Give the adapter a slot of its own, unless it has one.

        Raises:
            AdapterCapacityError: no slot is left for it.
        """
        number = adapter.engine_id
        if self._slots.is_pinned(number):
            return
        try:
            await self._slots.pin(number, PIN_WAIT_SECONDS)
        except NoSlotError:
            raise AdapterCapacityError(
                f"Adapter {adapter.shown} cannot be pinned: No free lora slots, all "
                f"{self._slots.count} are pinned or in use"
            ) from None
        try:
            async with self._lock:
                await self._pin_in_engine(adapter)
        except BaseException:
            await self.unpin(number)
            raise

    async def unpin(self, number: int) -> None:
        """Release the slot of an adapter; its running requests need one like others'."""
        self._awaited.discard(number)
        await self._unpin_in_engine(number)
        self._slots.unpin(number)

    @contextlib.asynccontextmanager
    async def replacing(self, adapter: AdapterRef) -> AsyncIterator[None]:
        """Load the adapter in the body, which gets the slot of the one that it replaces.

        If it is not pinned, that one is not any more. If every slot is pinned, the old one's is
        free in the engine for the load. On an error the old one stays pinned.
        """
        number, old = adapter.engine_id, adapter.replaces
        is_awaited = old in self._awaited
        self._awaited.discard(old)
        was_pinned = old in self._in_engine
        try:
            if self._slots.is_all_pinned:
                await self._unpin_in_engine(old)
            yield
            await self._unpin_in_engine(old)  # before another may have the slot
        except BaseException:
            if (is_awaited or was_pinned) and not self._calls.is_dead:
                self._awaited.add(old)
                await self.complete(old)
            raise
        if not adapter.pinned:
            self._slots.unpin(old)
            return
        self._slots.succeed(number, old)
        self._awaited.add(number)
        await self.complete(number)

    async def complete(self, number: int) -> None:
        """Pin in the engine what has its slot by now, and is not pinned there."""
        if number not in self._awaited or not self._slots.is_alone(number):
            return
        async with self._lock:
            adapter = self._find(number)
            if adapter is None or number not in self._awaited:
                return
            self._awaited.discard(number)
            try:
                await self._pin_in_engine(adapter)
            except AdapterCapacityError as error:
                # Its slot is its own in any case; in the engine it may be evicted and read again.
                logger.warning("adapter %s is not pinned in the engine: %s", adapter.shown, error)
            except BaseException:  # the request that it began with has gone
                self._awaited.add(number)
                raise

    async def _unpin_in_engine(self, number: int) -> None:
        """Let the engine evict the adapter; a step that needs it reads its private copy again."""
        async with self._lock:
            if number in self._in_engine and not self._calls.is_dead:
                await self._calls.remove_adapter(number)
            self._in_engine.discard(number)

    async def _pin_in_engine(self, adapter: LoadedAdapter) -> None:
        self._in_engine.add(adapter.engine_id)  # also if this is cancelled halfway
        for attempt in range(_PIN_ATTEMPTS):
            try:
                await self._calls.add_adapter(adapter)
                await self._calls.pin_adapter(adapter.engine_id)
            except Exception as error:  # vLLM raises a bare Exception here
                if self._calls.is_dead:
                    raise
                is_evicted = isinstance(error, WorkerRefusalError) and error.kind is Refusal.EVICTED
                if attempt + 1 < _PIN_ATTEMPTS and is_evicted:
                    continue
                raise AdapterCapacityError(
                    f"Adapter {adapter.shown} cannot be pinned: {error}"
                ) from error
            return
