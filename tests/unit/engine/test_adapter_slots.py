"""Slots for adapters: never more distinct ones in the engine than fit, and no starvation."""

import asyncio

import pytest

from lmi_vllm.engine.vllm.workarounds.adapter_slots import AdapterSlots, NoSlotError


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Holder:
    """A request that holds its slot until it is told to end."""

    def __init__(self, slots: AdapterSlots, adapter: int) -> None:
        self.is_in = False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(slots, adapter))

    async def _run(self, slots: AdapterSlots, adapter: int) -> None:
        async with slots.hold(adapter):
            self.is_in = True
            await self._end.wait()

    async def end(self) -> None:
        """Finish the request."""
        self._end.set()
        await asyncio.wait([self.task])
        await settle()


async def test_third_adapter_waits_for_one_of_two_slots() -> None:
    """Requests of adapters that are in may join; another waits, and comes in when one is out."""
    slots = AdapterSlots(2)
    first, second, third = (Holder(slots, number) for number in (1, 2, 3))
    await settle()
    joined = Holder(slots, 1)
    await settle()
    assert [item.is_in for item in (first, second, third, joined)] == [True, True, False, True]
    await second.end()
    assert third.is_in


async def test_waiting_adapters_are_not_starved() -> None:
    """After a while newcomers wait behind the one who waits for a slot."""
    now = 0.0
    slots = AdapterSlots(1, clock=lambda: now)
    first, waiting = Holder(slots, 1), Holder(slots, 2)
    await settle()
    now = 10.0
    late = Holder(slots, 1)
    await settle()
    assert not late.is_in
    await first.end()
    assert waiting.is_in
    assert not late.is_in
    await waiting.end()
    assert late.is_in


async def test_pin_takes_a_slot_and_refuses_when_none_is_left() -> None:
    """A pinned adapter keeps its slot; with all pinned others are refused, waiting ones too."""
    slots = AdapterSlots(1)
    running, waiting = Holder(slots, 1), Holder(slots, 2)
    await settle()
    pin = asyncio.create_task(slots.pin(1, 1))
    await pin
    await settle()
    assert isinstance(waiting.task.exception(), NoSlotError)
    with pytest.raises(NoSlotError):
        async with slots.hold(3):
            pass
    with pytest.raises(NoSlotError):
        await slots.pin(3, 1)
    await running.end()
    slots.unpin(1)
    assert await _may_hold(slots, 3)


async def test_pin_waits_for_others_and_gives_up_in_time() -> None:
    """The last slot is pinned once its request is out; until then, or never, nothing changes."""
    slots = AdapterSlots(1)
    running = Holder(slots, 1)
    await settle()
    with pytest.raises(NoSlotError):
        await slots.pin(2, 0.01)
    pin = asyncio.create_task(slots.pin(2, 5))
    await settle()
    assert not pin.done()
    await running.end()
    await pin
    assert slots.is_pinned(2)


async def test_successor_gets_the_slot_when_the_old_one_has_ended() -> None:
    """Until then both share it in turn; others wait, since one of two slots is not pinned."""
    slots = AdapterSlots(2)
    await slots.pin(1, 1)
    old, other = Holder(slots, 1), Holder(slots, 3)
    await settle()
    slots.succeed(2, 1)
    new, late = Holder(slots, 2), Holder(slots, 1)
    await settle()
    assert [one.is_in for one in (new, late)] == [False, True]
    assert slots.is_pinned(2)
    assert not slots.is_alone(2)
    await other.end()  # its slot is for the old one's requests
    another = Holder(slots, 4)
    await settle()
    assert [one.is_in for one in (new, another)] == [True, False]
    slots.unpin(1)
    await old.end()
    await late.end()
    assert another.is_in
    assert slots.is_alone(2)


async def test_pinned_slot_is_used_in_turn_and_freed_with_its_last_adapter() -> None:
    """With every slot pinned; the removal of the last one does not end the first one's request."""
    slots = AdapterSlots(1)
    await slots.pin(1, 1)
    old = Holder(slots, 1)
    await settle()
    slots.succeed(2, 1)
    second = Holder(slots, 2)
    slots.succeed(3, 2)
    third = Holder(slots, 3)
    await settle()
    assert [one.is_in for one in (second, third)] == [False, False]
    slots.unpin(1)
    await old.end()
    assert [one.is_in for one in (second, third)] == [True, False]
    slots.unpin(2)
    slots.unpin(3)
    await settle()
    assert not slots.is_all_pinned
    await second.end()
    assert third.is_in
    await third.end()
    assert await _may_hold(slots, 4)


async def test_pin_takes_a_slot_that_an_unpinned_adapter_leaves() -> None:
    """No request has to end for it."""
    slots = AdapterSlots(2)
    await slots.pin(1, 1)
    running = Holder(slots, 2)
    await settle()
    pin = asyncio.create_task(slots.pin(3, 5))
    await settle()
    assert not pin.done()
    slots.unpin(1)
    await settle()
    assert pin.done()
    await running.end()


@pytest.mark.parametrize("is_granted", [False, True])
async def test_cancelled_waiter_leaves_its_slot(is_granted: bool) -> None:
    """A client that disconnects while it waits, or just as it is admitted, blocks no other."""
    slots = AdapterSlots(1)
    first, waiting = Holder(slots, 1), Holder(slots, 2)
    await settle()
    if is_granted:
        first._end.set()
        await asyncio.sleep(0)
    waiting.task.cancel()
    await settle()
    await first.end()
    assert await _may_hold(slots, 3)


async def _may_hold(slots: AdapterSlots, adapter: int) -> bool:
    async with asyncio.timeout(1), slots.hold(adapter):
        return True
