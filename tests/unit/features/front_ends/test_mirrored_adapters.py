"""Adapters of a front-end process that follows the first one."""

import asyncio
from dataclasses import replace

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.errors import NotReadyError, UnknownAdapterError
from lmi_vllm.features.front_ends.mirrored_adapters import MirroredAdapters
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import AdapterRef


async def nothing_to_load(name: str) -> None:
    """Know no adapter that is not loaded."""
    raise UnknownAdapterError(name)


def loaded(name: str, engine_id: int) -> Adapter:
    """Return an adapter in the engine."""
    return Adapter(name, f"/{name}", ref=AdapterRef(name, f"/{name}", engine_id))


def following() -> MirroredAdapters:
    """Return a registry that follows."""
    return MirroredAdapters(ScriptedEngine(), nothing_to_load, is_enabled=True)


async def test_follows_each_list() -> None:
    """What is listed is routed, what is no longer listed is unknown."""
    adapters = following()
    assert await adapters.follow([loaded("a", 1), loaded("b", 2)]) == []
    async with adapters.hold("b") as held:
        assert held.ref == AdapterRef("b", "/b", 2)
    gone = await adapters.follow([loaded("a", 1)])
    assert gone == [AdapterRef("b", "/b", 2)]
    with pytest.raises(UnknownAdapterError):
        async with adapters.hold("b"):
            pass


async def test_a_list_is_followed_when_no_request_uses_another_load() -> None:
    """A name gets new weights: who runs keeps the old ones, and letting go waits for them."""
    adapters = following()
    await adapters.follow([loaded("a", 1)])
    async with adapters.hold("a") as old:
        gone = await adapters.follow([loaded("a", 7)])
        change = asyncio.create_task(adapters.wait_unused(gone, 30))
        await asyncio.sleep(0.05)
        assert not change.done()
        async with adapters.hold("a") as new:
            assert (old.ref, new.ref) == (AdapterRef("a", "/a", 1), AdapterRef("a", "/a", 7))
    await asyncio.wait_for(change, 5)


async def test_waits_no_longer_than_the_limit() -> None:
    """A request that does not end delays an unload by the limit at most."""
    adapters = following()
    await adapters.follow([loaded("a", 1)])
    async with adapters.hold("a"):
        gone = await adapters.follow([])
        await asyncio.wait_for(adapters.wait_unused(gone, 0.05), 5)


async def test_asks_for_an_adapter_that_is_not_loaded() -> None:
    """The first process loads it and lists it; then the request finds it."""
    asked = []

    async def load(name: str) -> None:
        asked.append(name)
        await adapters.follow([loaded(name, 3)])

    adapters = MirroredAdapters(ScriptedEngine(), load, is_enabled=True)
    await adapters.follow([replace(loaded("a", 3), ref=None, preload=False)])
    async with adapters.hold("a") as held:
        assert held.ref == AdapterRef("a", "/a", 3)
    assert asked == ["a"]


async def test_an_adapter_that_went_meanwhile_is_unknown() -> None:
    """By the name the client used, as in the first process."""
    adapters = following()
    await adapters.follow([replace(loaded("a", 3), ref=None, preload=False)])
    with pytest.raises(UnknownAdapterError, match="mine"):
        async with adapters.hold("a", "mine"):
            pass


@pytest.mark.parametrize("has_store", [True, False])
async def test_an_adapter_that_made_room_meanwhile_is_not_unknown(has_store: bool) -> None:
    """The first process had it, and its next list does not: without a store a call removed it."""

    async def load(_: str) -> None:
        await adapters.follow([])

    async def find(_: str) -> bool:
        return True

    hooks = AdapterHooks(find if has_store else None)
    adapters = MirroredAdapters(ScriptedEngine(), load, is_enabled=True, hooks=lambda _: hooks)
    await adapters.follow([replace(loaded("a", 3), ref=None, preload=False)])
    with pytest.raises(NotReadyError if has_store else UnknownAdapterError, match="mine"):
        async with adapters.hold("a", "mine"):
            pass
