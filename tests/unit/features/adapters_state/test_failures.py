"""Replicas whose refresh fails half way, or meets a call: nothing is lost, nothing stays wrong."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.adapters_state import reconciler, sharing
from lmi_vllm.features.adapters_state.shared_object import ReplicatedAdapters
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import AdapterRef
from tests.support.adapter_hooks import hook
from tests.support.s3_server import BUCKET, S3Server
from tests.unit.features.adapters_state.conftest import AWAY, KEY, Replica, Start, document


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What sources wait for; open at the end, so that no thread is left behind."""
    opened = threading.Event()
    yield opened
    opened.set()


async def no_answer(_: ScriptedEngine, _adapter: AdapterRef) -> None:
    """An engine's method that fails."""
    raise EngineFailureError("no answer")


async def test_adapter_that_cannot_be_unloaded_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays routable here meanwhile, and the report names it."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()

    with monkeypatch.context() as patched:
        await a.registry.unregister("fr", 5)
        patched.setattr(ScriptedEngine, "unload_adapter", no_answer)
        await b.sync()
    assert b.names == ["fr"]
    assert list(b.shared.missing) == ["fr"]
    b.time += reconciler.FIRST_RETRY_SECONDS
    await b.sync()
    assert (b.names, b.shared.missing) == ([], {})


async def test_error_of_any_kind_is_tried_again(start: Start) -> None:
    """Also one that is no error of ours."""
    a, b = await start("a").begin(), await start("b").begin()
    b.broken.add("/fr")
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    assert b.shared.missing == {"fr": "RuntimeError('/fr')"}
    b.broken.clear()
    b.time += reconciler.FIRST_RETRY_SECONDS
    await b.sync()
    assert (b.names, b.shared.missing) == (["fr"], {})


async def test_call_during_a_refresh_is_newer(
    start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the refresh was about to do to that name is not done; the others have the call's."""
    # Sources that hang leave threads for the call's own, which waits neither for them nor for long.
    monkeypatch.setattr(reconciler, "MAX_CONCURRENT", 2)
    monkeypatch.setattr(sharing, "READ_SECONDS", 0.05)
    monkeypatch.setattr(sharing, "ARRIVE_SECONDS", 0.05)
    a, b = await start("a").begin(), await start("b").begin()
    b.gate = gate
    names = {f"n{number}" for number in range(reconciler.MAX_CONCURRENT + 1)}
    for name in names:
        await a.registry.register(Adapter(name, f"/{name}"))
    refreshed = asyncio.create_task(b.sync())
    while len(b.asked) < reconciler.MAX_CONCURRENT:  # noqa: ASYNC110 (threads ask)
        await asyncio.sleep(0.005)
    (waiting,) = names - {src.removeprefix("/") for src in b.asked}
    called = asyncio.create_task(b.registry.register(Adapter(waiting, "/own")))
    while waiting not in b.names:  # noqa: ASYNC110 (its call goes on to write)
        await asyncio.sleep(0.005)
    gate.set()
    await asyncio.gather(refreshed, called)
    for one in (b, a, b):
        await one.sync()
    assert a.registry.describe(waiting).src == b.registry.describe(waiting).src == "/own"


@asynccontextmanager
async def held_call(
    replica: Replica, call: Coroutine[Any, Any, None]
) -> AsyncIterator[asyncio.Task[None]]:
    """Hold a call between its change and the end of its answer while the body runs."""
    changed, goes_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        changed.set()
        goes_on.wait(60)

    hook(replica.registry, on_change=hold)
    task = asyncio.create_task(call)
    await asyncio.to_thread(changed.wait, 60)
    hook(replica.registry, on_change=None)
    try:
        yield task
    finally:
        goes_on.set()
        await task


async def all_have(src: str, *replicas: Replica) -> bool:
    """Return whether all have `fr` from this source once each has read twice."""
    for one in (*replicas, *replicas):
        one.time += reconciler.MAX_RETRY_SECONDS
        await one.sync()
    return all(one.registry.describe("fr").src == src for one in replicas) and not any(
        one.shared.missing for one in replicas
    )


async def test_retry_does_not_undo_a_call_that_is_not_noted_yet(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal by another replica failed here; a call puts its own there, then it is due again."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()

    await a.registry.unregister("fr", 5)
    with monkeypatch.context() as patched:
        patched.setattr(ScriptedEngine, "unload_adapter", no_answer)
        await b.sync()
    async with held_call(b, b.registry.replace(Adapter("fr", "/own"), 5)):
        b.time += reconciler.FIRST_RETRY_SECONDS
        await b.sync()
        assert b.registry.describe("fr").src == "/own"
    assert await all_have("/own", a, b)


async def test_refresh_does_not_undo_a_call_that_is_not_noted_yet(start: Start) -> None:
    """Another replica's change is read in between: the call's is written later, and counts."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    async with held_call(b, b.registry.replace(Adapter("fr", "/own"), 5)):
        await a.registry.replace(Adapter("fr", "/others"), 5)
        await b.sync()
        assert b.registry.describe("fr").src == "/own"
    assert await all_have("/own", a, b)


async def test_refresh_that_waits_for_a_call_does_not_undo_it(
    start: Start, gate: threading.Event
) -> None:
    """It was begun before the call's change, and has the name's lock after it."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    b.gate = gate
    called = asyncio.create_task(b.registry.replace(Adapter("fr", "/slow"), 5))
    while "/slow" not in b.asked:  # noqa: ASYNC110 (a thread asks)
        await asyncio.sleep(0.005)
    await a.registry.replace(Adapter("fr", "/others"), 5)
    refreshed = asyncio.create_task(b.sync())
    while not b.shared.missing:  # noqa: ASYNC110 (the refresh reads in a thread)
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    gate.set()
    await asyncio.gather(called, refreshed)
    assert await all_have("/slow", a, b)
    assert "/others" not in b.asked


async def test_on_demand_adapter_removes_no_shared_one(start: Start) -> None:
    """Neither its registration nor its eviction is a change that others are to have."""
    a, b = await start("a").begin(), await start("b").begin()
    b.refused.add("/fr")
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    await b.registry.register(Adapter("fr", "/f", path="/f", is_from_store=True))
    await b.sync()
    await a.sync()
    assert a.names == ["fr"]
    await b.registry.unregister("fr", 5, only_from_store=True)
    await b.sync()
    b.refused.clear()
    assert await all_have("/fr", a, b)


async def test_pin_that_loses_to_another_update_is_undone(start: Start) -> None:
    """A call cannot unpin, but the later of two updates counts on every replica."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    await b.registry.update("fr", lambda one: replace(one, options={"x": "1"}), 5)
    assert await all_have("/fr", a, b)
    assert [one.registry.describe("fr").pin for one in (a, b)] == [False, False]
    assert a.registry.describe("fr").options == {"x": "1"}


async def test_change_of_a_call_that_then_fails_is_shared(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new weights serve here; that the old ones could not be dropped undoes nothing."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()

    with monkeypatch.context() as patched:
        patched.setattr(ScriptedEngine, "unload_adapter", no_answer)
        with pytest.raises(EngineFailureError):
            await a.registry.replace(Adapter("fr", "/new"), 5)
    assert await all_have("/new", a, b)


async def test_unfinished_removal_holds_on_every_replica(
    start: Start, empty_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which may have dropped it already, do not load it again; here it is retried."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()

    with monkeypatch.context() as patched:
        patched.setattr(ScriptedEngine, "unload_adapter", no_answer)
        with pytest.raises(EngineFailureError):
            await a.registry.unregister("fr", 5)
    assert list(a.shared.missing) == ["fr"]
    b.asked.clear()
    for one in (a, b, a, b):
        await one.sync()
    assert a.names == b.names == document(empty_store)["adapters"] == b.asked == []


@pytest.mark.parametrize("lost", [1, 3], ids=["the client repeats it", "the client gives up"])
async def test_write_with_a_lost_response_is_applied_once(
    start: Start, empty_store: S3Server, lost: int
) -> None:
    """The repeated write meets the first one: 412, read again, and nothing of another's is lost."""
    a, b = await start("a").begin(), await start("b").begin()
    await b.registry.register(Adapter("de", "/de"))
    empty_store.lost_answers_left = lost
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    load = b.engine.adapters["fr"].engine_id
    for one in (a, b, a, b):
        await one.sync()
    assert a.names == b.names == ["de", "fr"]
    assert sorted(entry["name"] for entry in document(empty_store)["adapters"]) == ["de", "fr"]
    assert b.engine.adapters["fr"].engine_id == load


async def test_refresh_continues_after_an_error_of_any_kind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose refresh has ended would serve old adapters for good."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("of a library")

    with monkeypatch.context() as patched:
        patched.setattr(b.state, "read", fail)
        running = asyncio.create_task(b.shared.run())
        b.shared._wake.set()
        await asyncio.to_thread(failed.wait, 60)
    deadline = time.monotonic() + 60
    while b.names != ["fr"] and not running.done():
        assert time.monotonic() < deadline
        b.shared._wake.set()
        await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


async def test_store_that_hangs_stops_no_load_of_adapters(
    start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that wait for replicas take no thread of those that read adapters and prompts."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    asked = threading.Event()

    def hang() -> dict[str, object]:
        asked.set()
        gate.wait(60)
        return {}

    monkeypatch.setattr(a.state, "live_reports", hang)
    waiting = [asyncio.create_task(a.shared.confirm("fr")) for _ in range(3)]
    while not asked.is_set():  # noqa: ASYNC110 (a thread asks)
        await asyncio.sleep(0.005)
    assert await asyncio.wait_for(asyncio.to_thread(str, 1), 30) == "1"
    gate.set()
    await asyncio.gather(*waiting)


async def test_shutdown_writes_acknowledged_changes(start: Start, empty_store: S3Server) -> None:
    """A store that was away for a moment before a rolling update loses no registration."""
    a = await start("a").begin()
    empty_store.refusal = AWAY
    await a.registry.register(Adapter("fr", "/fr"))
    empty_store.refusal = None
    await a.shared.close()
    b: Replica = await start("b").begin()
    assert b.names == ["fr"]


async def test_streams_on_old_weights_keep_no_other_adapter_waiting(start: Start) -> None:
    """As many as load at once are replaced, and each old one is used."""
    a, b = await start("a").begin(), await start("b").begin()
    replaced = [f"r{number}" for number in range(reconciler.MAX_CONCURRENT)]
    async with AsyncExitStack() as streams:
        for name in replaced:
            await a.registry.register(Adapter(name, f"/{name}"))
        await b.sync()
        for name in replaced:
            await streams.enter_async_context(b.registry.hold(name))
            await a.registry.replace(Adapter(name, f"/{name}/v2"), 5)
        await b.shared.sync(reconcile_seconds=0.01)
        await a.registry.register(Adapter("fr", "/fr"))
        async with asyncio.timeout(4):  # less than the old weights wait for their requests
            while "fr" not in b.names:
                await b.shared.sync(reconcile_seconds=0.01)
                await asyncio.sleep(0.01)


async def test_calls_share_the_read_that_waits(
    start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store hangs, no call adds one of its own; each has one that begins after it."""
    monkeypatch.setattr(sharing, "READ_SECONDS", 0.1)
    a = await start("a").begin()
    reads, read = [0], a.state.read

    def hang() -> ReplicatedAdapters | None:
        reads[0] += 1
        gate.wait(60)
        return read()

    monkeypatch.setattr(a.state, "read", hang)
    await asyncio.gather(*(a.registry.refresh(f"n{number}") for number in range(20)))
    await asyncio.gather(*(a.registry.refresh(f"m{number}") for number in range(20)))
    gate.set()
    await a.sync()
    assert reads[0] == 3  # the one that hung, the one that all others waited for, and this


async def test_server_that_has_ended_reports_nothing(
    start: Start, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, empty_store: S3Server
) -> None:
    """Neither by a read that hung meanwhile, nor by one that waited for it."""
    monkeypatch.setattr(sharing, "READ_SECONDS", 0.05)
    monkeypatch.setattr(sharing, "WRITE_SECONDS", 0.1)
    a = await start("a").begin()
    read = a.state.read
    monkeypatch.setattr(a.state, "read", lambda: gate.wait(60) and read())
    a.time += sharing.REPORT_SECONDS
    running = asyncio.create_task(a.sync())
    await asyncio.sleep(0.05)
    await a.registry.refresh("fr")
    await a.shared.close()
    gate.set()
    await running
    await a.sync()
    listed = empty_store.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{KEY}.replicas/")
    assert listed["KeyCount"] == 0
