"""Calls on adapters that came from the store of adapters: they hold on every replica."""

import asyncio
import time
from dataclasses import replace

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import (
    AdapterCapacityError,
    LmiError,
    NotReadyError,
    RequestError,
    ResourceNotFoundError,
)
from lmi_vllm.features.adapters_state import shared_object
from lmi_vllm.features.adapters_state.shared_object import (
    MAX_REMOVED,
    REMOVED_SECONDS,
    ReplicatedAdapters,
)
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import AdapterRef
from tests.support.adapter_hooks import hook
from tests.support.s3_server import S3Server
from tests.unit.features.adapters_state.conftest import Replica, Start, document

FOUND = Adapter("fr", "/fr", path="/cache/fr", is_from_store=True)


async def with_store(start: Start, name: str) -> Replica:
    """Return a replica that has a store of adapters, and has found `fr` there."""
    replica: Replica = start(name)
    hook(replica.registry, find=nothing_found)
    await replica.begin()
    await replica.registry.register(FOUND)
    return replica


async def lacking(replica: Replica) -> dict[str, str]:
    """Return which others have not the change of `fr` when the time of `wait=true` is up."""
    waiting = asyncio.create_task(replica.shared.confirm("fr"))
    await asyncio.sleep(0.1)
    replica.time += 1000.0
    return await waiting


async def nothing_found(_name: str) -> bool:
    """Register nothing."""
    return False


async def test_pin_of_a_found_adapter_is_a_registration_everywhere(
    start: Start, empty_store: S3Server
) -> None:
    """Replicas that have found it, that have not, and that start later."""
    a, b = await with_store(start, "a"), await with_store(start, "b")
    c = await start("c").begin()
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    assert await lacking(a) == dict.fromkeys("bc", "has not read the change")
    for one in (a, b, c, late := await start("late").begin()):
        await one.sync()
        assert one.registry.describe("fr").pin
        assert not one.registry.is_from_store("fr")
        assert one.engine.adapters["fr"].path == "/fr"
    assert await a.shared.confirm("fr") == {}
    assert late.engine.adapters["fr"].pinned
    assert [entry["pin"] for entry in document(empty_store)["adapters"]] == [True]


async def test_pin_of_a_found_adapter_needs_no_second_slot(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shared gets the slot of what the call pinned."""
    a = await with_store(start, "a")
    load = ScriptedEngine.load_adapter

    async def load_in_one_slot(engine: ScriptedEngine, adapter: AdapterRef) -> None:
        pinned = [one for one in engine.adapters.values() if one.pinned]
        own = (adapter.engine_id, adapter.replaces)
        if adapter.pinned and any(one.engine_id not in own for one in pinned):
            raise AdapterCapacityError("No free lora slots")
        await load(engine, adapter)

    monkeypatch.setattr(ScriptedEngine, "load_adapter", load_in_one_slot)
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    await a.sync()
    assert a.shared.missing == {}
    assert not a.registry.is_from_store("fr")
    assert a.engine.adapters["fr"].pinned


async def test_delete_of_a_found_adapter_hides_it_everywhere(
    start: Start, empty_store: S3Server
) -> None:
    """Until a call registers the name; who still serves it is named to `wait=true`."""
    a, b = await with_store(start, "a"), await with_store(start, "b")
    await a.registry.unregister("fr", 5)
    assert b.names == ["fr"]
    assert await lacking(a) == {"b": "has not read the change"}
    await b.sync()
    late = await start("late").begin()
    assert await a.shared.confirm("fr") == {}
    for one in (a, b, late):
        assert one.names == []
        assert one.shared.is_removed("fr")
    assert list(document(empty_store)["removed"]) == ["fr"]
    await late.registry.register(Adapter("fr", "/own"))
    for one in (a, b, late):
        await one.sync()
        assert one.engine.adapters["fr"].path == "/own"
        assert not one.shared.is_removed("fr")
    assert document(empty_store)["removed"] == {}


async def test_delete_of_a_pinned_one_hides_it_too(start: Start) -> None:
    """It was registered by the pin, and the store has the name still."""
    a, b = await with_store(start, "a"), await with_store(start, "b")
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    await b.sync()
    await b.registry.unregister("fr", 5)
    await a.sync()
    assert a.names == b.names == []
    assert a.shared.is_removed("fr")


@pytest.mark.parametrize("error", [NotReadyError("store away"), RequestError("refused weights")])
async def test_one_that_cannot_be_found_here_is_deleted_elsewhere(
    start: Start, error: LmiError
) -> None:
    """The store does not answer this server, or has weights by now that are refused."""
    a, b = await with_store(start, "a"), await start("b").begin()
    failing: list[LmiError] = []

    async def find(_name: str) -> bool:
        if failing:
            raise failing[0]
        return False

    hook(b.registry, find=find)
    with pytest.raises(ResourceNotFoundError):
        await b.registry.remove("fr", 5)
    failing.append(error)
    await b.registry.remove("fr", 5)
    await a.sync()
    assert a.names == []
    assert a.shared.is_removed("fr")


async def test_one_that_no_server_can_load_is_deleted(start: Start, empty_store: S3Server) -> None:
    """Its source is gone: it need not be registered again first."""
    a, b = await start("a").begin(), await start("b").begin()
    b.refused.add("/fr")
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    assert list(b.shared.missing) == ["fr"]
    await b.registry.remove("fr", 5)
    assert document(empty_store)["adapters"] == []
    assert b.shared.missing == {}
    await a.sync()
    assert a.names == []


async def test_adapter_found_while_it_is_deleted_does_not_stay(start: Start) -> None:
    """A load that began before the change was read ends after it."""
    a, b = await with_store(start, "a"), await start("b").begin()
    await a.registry.unregister("fr", 5)
    await b.sync()
    await b.registry.register(FOUND)
    assert list(b.shared.missing) == ["fr"]
    await b.sync()
    assert b.names == []


async def test_eviction_and_renewal_are_no_calls(start: Start, empty_store: S3Server) -> None:
    """What the store of one replica does is that replica's own."""
    a, b = await with_store(start, "a"), await with_store(start, "b")
    await a.registry.replace(replace(a.registry.describe("fr"), path="/cache/2", ref=None), 5)
    await a.registry.unregister("fr", 5, only_from_store=True)
    await a.sync()
    await b.sync()
    assert b.names == ["fr"]
    assert not a.shared.is_removed("fr")
    await a.registry.register(Adapter("de", "/de"))
    assert [entry["name"] for entry in document(empty_store)["adapters"]] == ["de"]
    assert document(empty_store)["removed"] == {}


async def test_without_a_store_nothing_is_remembered(start: Start, empty_store: S3Server) -> None:
    """No one would look the name up."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await a.registry.unregister("fr", 5)
    assert document(empty_store)["removed"] == {}


def test_removals_are_bounded_in_number_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes first; one that is too old counts no more, also where no one writes."""
    monkeypatch.setattr(shared_object, "MAX_REMOVED", 2)
    shared = ReplicatedAdapters()
    for name in "abc":
        shared = shared.with_changes({name: None}, is_removal_kept=True)
    read = ReplicatedAdapters.read(shared.encoded(), "place")
    assert list(read.removed) == ["b", "c"]
    assert read.is_removed("b")
    now = time.time()
    monkeypatch.setattr(shared_object.time, "time", lambda: now + REMOVED_SECONDS + 60)
    assert not read.is_removed("b")
    assert list(read.with_changes({"d": None}, is_removal_kept=True).removed) == ["d"]
    assert MAX_REMOVED == 10_000
