"""Several registries over one object in a real S3 store, each as the server of a replica has it."""

import asyncio
import functools
import threading
import time
from dataclasses import replace

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.errors import DownloadError, ModelSourceError, ResourceNotFoundError
from lmi_vllm.features.adapters_state import reconciler, sharing
from lmi_vllm.features.object_stores import location
from lmi_vllm.sources.base import UnreachableError
from tests.support.s3_server import BUCKET, S3Server
from tests.unit.features.adapters_state.conftest import AWAY, FOLDER, KEY, Replica, Start, document

ATTEMPTS = 3  # of the client, at each request


async def test_adapter_calls_reach_all_replicas(start: Start) -> None:
    """Register, update, replace and remove; a new one has it before it is ready."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr", options={"x": "1"}))
    await b.sync()
    assert b.engine.adapters["fr"].path == "/fr"
    first = b.engine.adapters["fr"].engine_id
    await a.registry.update("fr", lambda one: replace(one, pin=True), 5)
    await b.sync()
    assert b.registry.describe("fr").pin
    assert b.engine.adapters["fr"].engine_id == first
    await b.registry.replace(Adapter("fr", "/fr2"), 5)
    c = await start("c").begin()
    assert c.engine.adapters["fr"].path == "/fr2"
    await a.sync()
    assert a.engine.adapters["fr"].path == "/fr2"
    await c.registry.unregister("fr", 5)
    await a.sync()
    await b.sync()
    assert a.names == b.names == c.names == []
    assert a.engine.adapters == b.engine.adapters == {}


async def test_registering_a_name_again_loads_it_again(
    start: Start,
) -> None:
    """Its files may be others by now."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    first = b.engine.adapters["fr"].engine_id
    await a.registry.unregister("fr", 5)
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    assert b.engine.adapters["fr"].engine_id > first


async def test_no_update_is_lost_when_replicas_write_at_once(
    start: Start, empty_store: S3Server
) -> None:
    """Writes are conditional: who comes late reads again and keeps what the other wrote."""
    replicas = [await start(name).begin() for name in "abc"]
    await asyncio.gather(
        *(
            one.registry.register(Adapter(f"{index}-{number}", f"/{index}/{number}"))
            for index, one in enumerate(replicas)
            for number in range(4)
        )
    )
    for one in replicas:
        await one.sync()
    names = sorted(f"{index}-{number}" for index in range(3) for number in range(4))
    for one in replicas:
        await one.sync()
        assert one.names == names
    assert sorted(entry["name"] for entry in document(empty_store)["adapters"]) == names


async def test_adapters_of_the_model_and_of_a_store_are_not_shared(
    start: Start, empty_store: S3Server
) -> None:
    """Each replica has its own; a call's goes before one that was found."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("local", "/l", is_local=True))
    await a.registry.register(Adapter("found", "/f", path="/f", is_from_store=True))
    await a.registry.register(Adapter("fr", "/fr"))
    assert [entry["name"] for entry in document(empty_store)["adapters"]] == ["fr"]
    await b.registry.register(Adapter("fr2", "/x", path="/x", is_from_store=True))
    await b.registry.register(Adapter("local", "/other"))
    await a.registry.register(Adapter("fr2", "/own"))
    await b.sync()
    assert b.engine.adapters["fr2"].path == "/own"
    await a.sync()
    assert a.engine.adapters["local"].path == "/l"
    assert list(a.shared.missing) == ["local"]


async def test_unavailable_store_does_not_stop_serving(start: Start, empty_store: S3Server) -> None:
    """What is known is served, calls work here, and all is shared when the store is back."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    empty_store.refusal = AWAY
    b.time = 100.0
    await b.registry.register(Adapter("de", "/de"))
    async with b.registry.hold("fr"), b.registry.hold("de"):
        pass
    assert b.shared.age_seconds == 100.0
    await b.shared.changed("fr")
    for name, text in (("de", "cannot be written now"), ("fr", "cannot be read now")):
        waiting = asyncio.create_task(b.shared.confirm(name))
        await asyncio.sleep(0.1)
        b.time += 1000.0
        assert text in (await waiting)[FOLDER + "adapters.json"]
    b.time = 100.0
    empty_store.refusal = None
    await b.sync()
    await a.sync()
    assert a.names == ["de", "fr"]
    assert b.shared.age_seconds == 0.0


async def test_new_replica_waits_for_a_store_that_is_away(
    start: Start, empty_store: S3Server
) -> None:
    """It is not ready without the adapters: requests for them would be refused."""
    await (await start("a").begin()).registry.register(Adapter("fr", "/fr"))
    empty_store.refusal = AWAY
    begun = asyncio.create_task((late := start("late")).begin())
    before = len(empty_store.signed)
    deadline = time.monotonic() + 60
    while len(empty_store.signed) < before + 4:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert not begun.done()
    empty_store.refusal = None
    await begun
    assert late.names == ["fr"]


async def test_foreign_state_object_ends_the_start_and_is_kept(
    start: Start, empty_store: S3Server
) -> None:
    """Writing over it would lose what it is; a running server goes on with what it has."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    empty_store.put({KEY: b"not ours"})
    with pytest.raises(ModelSourceError, match=r"adapters_state s3://.*cannot be read"):
        await start("b").begin()
    for _ in range(2):
        with pytest.raises(ModelSourceError):
            await a.sync()
    assert a.names == ["fr"]
    assert empty_store.client.get_object(Bucket=BUCKET, Key=KEY)["Body"].read() == b"not ours"


async def test_object_that_is_too_large_is_not_read(
    start: Start, empty_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of weights, by mistake, would fill the memory; a running server goes on."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    empty_store.put({KEY: b" " * 200_000})
    monkeypatch.setattr(location, "MAX_SMALL_BYTES", 100_000)
    with pytest.raises(DownloadError, match="has 200000 bytes; at most 100000 are read"):
        await start("b").begin()
    with pytest.raises(DownloadError):
        await a.sync()
    assert a.names == ["fr"]


async def test_store_without_conditional_writes_ends_the_start(
    start: Start, empty_store: S3Server
) -> None:
    """Replicas would undo each other's changes there, and no error would tell."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    empty_store.ignores_conditions = True
    with pytest.raises(ModelSourceError, match="ignores If-Match"):
        await start("b").begin()
    empty_store.ignores_conditions = False
    assert (await start("c").begin()).names == ["fr"]


async def test_object_that_is_removed_is_written_again(start: Start, empty_store: S3Server) -> None:
    """A mistake with a bucket unregisters nothing."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    empty_store.delete(KEY)
    await b.sync()
    await a.sync()
    assert a.names == b.names == ["fr"]
    assert [entry["name"] for entry in document(empty_store)["adapters"]] == ["fr"]


async def test_confirmation_waits_for_every_replica(start: Start, empty_store: S3Server) -> None:
    """It names those that have not, with their reason; one that has left is not waited for."""
    a, b, c = [await start(name).begin() for name in "abc"]
    await a.registry.register(Adapter("fr", "/fr"))
    waiting = asyncio.create_task(a.shared.confirm("fr"))
    await b.sync()
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await c.sync()
    assert await waiting == {}
    c.refused.add("/de")
    await a.registry.register(Adapter("de", "/de"))
    await c.sync()
    waiting = asyncio.create_task(a.shared.confirm("de"))
    await asyncio.sleep(0.1)
    a.time = 1000.0
    lacking = await waiting
    assert lacking == {"b": "has not read the change", "c": "Adapter de: /de is not here"}
    await b.sync()
    await c.shared.close()
    assert await a.shared.confirm("de") == {}


async def test_confirmation_outlives_a_store_that_is_away_for_a_moment(
    start: Start, empty_store: S3Server
) -> None:
    """Neither the write nor the reports are given up before the time is up."""
    a, b = await start("a").begin(), await start("b").begin()
    empty_store.refusal = AWAY
    await a.registry.register(Adapter("fr", "/fr"))
    waiting = asyncio.create_task(a.shared.confirm("fr"))
    await asyncio.sleep(0.2)
    empty_store.refusal = None
    deadline = time.monotonic() + 60
    find = functools.partial(empty_store.client.list_objects_v2, Bucket=BUCKET, Delimiter="/")
    while "Contents" not in await asyncio.to_thread(find, Prefix=KEY):  # reports are in a folder
        assert not waiting.done()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    empty_store.refusal, before = AWAY, len(empty_store.signed)
    while len(empty_store.signed) < before + 2 * ATTEMPTS:  # a whole read has failed
        assert not waiting.done()
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    empty_store.refusal = None
    await b.sync()
    assert await asyncio.wait_for(waiting, 60) == {}


async def test_confirmation_ends_in_time_where_the_store_hangs(
    start: Start, empty_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was lacking when it answered last."""
    a, _ = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    gate, reports, answers = threading.Event(), a.state.live_reports, []

    def hang() -> object:
        if answers:
            gate.wait(60)
        answers.append(reports())
        return answers[0]

    monkeypatch.setattr(a.state, "live_reports", hang)
    monkeypatch.setattr(sharing, "CONFIRM_SECONDS", 2.0)
    try:
        lacking = await asyncio.wait_for(a.shared.confirm("fr"), 30)
    finally:
        gate.set()
    assert lacking == {"b": "has not read the change"}


async def test_adapter_that_cannot_be_had_is_tried_again(start: Start) -> None:
    """Its entry stays; the others came."""
    a, b = await start("a").begin(), await start("b").begin()
    b.refused.add("/fr")
    await a.registry.register(Adapter("fr", "/fr"))
    await a.registry.register(Adapter("de", "/de"))
    await b.sync()
    assert b.names == ["de"]
    assert b.shared.missing == {"fr": "Adapter fr: /fr is not here"}
    b.refused.clear()
    await b.sync()
    assert b.names == ["de"]
    b.time += reconciler.FIRST_RETRY_SECONDS
    await b.sync()
    assert b.names == ["de", "fr"]
    await a.sync()
    assert a.names == ["de", "fr"]


async def test_new_replica_tries_a_failing_source_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready once it has the adapter."""
    late, begun = await begun_without(start, monkeypatch)
    late.refused.clear()
    late.time += reconciler.FIRST_RETRY_SECONDS
    await asyncio.wait_for(begun, 60)
    assert late.names == ["fr"]


async def test_long_loads_leave_time_for_another_try(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tries count from the end of the first loads."""
    late, begun = await begun_without(start, monkeypatch, load_seconds=2 * sharing.READY_SECONDS)
    late.load_seconds = 0.0
    late.refused.clear()
    late.time += reconciler.FIRST_RETRY_SECONDS
    await asyncio.wait_for(begun, 60)
    assert late.names == ["fr"]


async def test_new_replica_has_adapters_registered_while_it_loaded(start: Start) -> None:
    """It reads again what was long ago, before it is ready."""
    a, late = await start("a").begin(), start("late")
    await a.registry.register(Adapter("fr", "/fr"))
    late.gate = threading.Event()
    begun = asyncio.create_task(late.begin())
    deadline = time.monotonic() + 60
    while not late.asked:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await a.registry.register(Adapter("de", "/de"))
    late.time += 10.0
    late.gate.set()
    await asyncio.wait_for(begun, 60)
    assert late.names == ["de", "fr"]


async def test_replica_that_cannot_report_is_no_healthy_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on others wait for reports: without them `wait=true` would not wait for this one."""
    a = await start("a").begin()

    def refuse(_: object) -> None:
        raise UnreachableError("AccessDenied")

    monkeypatch.setattr(a.state, "report", refuse)
    a.time = 100.0
    with pytest.raises(UnreachableError):
        await a.sync()
    assert a.shared.age_seconds == 100.0


async def test_missing_source_does_not_block_new_replicas(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is missing is named."""
    late, begun = await begun_without(start, monkeypatch)
    late.time += sharing.READY_SECONDS
    await asyncio.wait_for(begun, 60)
    assert late.names == []
    assert "ready without adapter fr: Adapter fr: /fr is not here" in caplog.text


async def begun_without(
    start: Start, monkeypatch: pytest.MonkeyPatch, load_seconds: float = 0.0
) -> tuple[Replica, asyncio.Task[Replica]]:
    """Return a new replica that could not have the one adapter that is shared, and its start."""
    await (await start("a").begin()).registry.register(Adapter("fr", "/fr"))
    monkeypatch.setattr(sharing, "READY_PAUSE_SECONDS", 0.01)
    late: Replica = start("late")
    late.refused.add("/fr")
    late.load_seconds = load_seconds
    begun = asyncio.create_task(late.begin())
    deadline = time.monotonic() + 60
    while not late.shared.missing.get("fr", "not yet").startswith("Adapter fr"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert not begun.done()
    return late, begun


async def test_tries_become_rarer(start: Start) -> None:
    """A store that fails once costs seconds; what is broken for good costs little."""
    a, b = await start("a").begin(), await start("b").begin()
    b.refused.add("/fr")
    await a.registry.register(Adapter("fr", "/fr"))
    tries: list[float] = []
    while b.time < 40:
        before = len(b.asked)
        await b.sync()
        tries += [b.time] * (len(b.asked) - before)
        b.time += 1.0
    assert tries == [0, 2, 6, 14, 30]


async def test_another_version_restarts_the_retries(start: Start) -> None:
    """A version that fails once does not pay for one that was broken for good."""
    a, b = await start("a").begin(), await start("b").begin()
    b.refused |= {"/fr", "/fr2"}
    await a.registry.register(Adapter("fr", "/fr"))
    for _ in range(40):
        await b.sync()
        b.time += 1.0
    await a.registry.replace(Adapter("fr", "/fr2"), 5)
    await b.sync()
    b.refused.clear()
    b.time += reconciler.FIRST_RETRY_SECONDS
    await b.sync()
    assert b.engine.adapters["fr"].path == "/fr2"


async def test_calls_at_rest(start: Start, empty_store: S3Server) -> None:
    """One conditional read in each period, and a report now and then."""
    a = await start("a").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await a.sync()
    before = len(empty_store.signed)
    for _ in range(4):
        await a.sync()
    assert len(empty_store.signed) == before + 4
    a.time += sharing.REPORT_SECONDS
    await a.sync()
    assert len(empty_store.signed) == before + 6


async def test_removed_adapter_is_unknown(start: Start) -> None:
    """Also to calls."""
    a, b = await start("a").begin(), await start("b").begin()
    await a.registry.register(Adapter("fr", "/fr"))
    await b.sync()
    await b.registry.unregister("fr", 5)
    await a.sync()
    with pytest.raises(ResourceNotFoundError):
        a.registry.describe("fr")
