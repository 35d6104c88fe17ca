"""The registry: what it promises beyond single HTTP calls."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_vllm.adapters import source_threads
from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import MAX_FINDS, AdapterRegistry
from lmi_vllm.errors import (
    AdapterConflictError,
    AdapterRefusedError,
    NotReadyError,
    UnknownAdapterError,
)
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef
from tests.support.adapter_hooks import hook


class SlowEngine(ScriptedEngine):
    """Loads only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Wait for the gate, then load."""
        self.begun.set()
        await self.gate.wait()
        await super().load_adapter(adapter)


def registry_over(engine: ScriptedEngine) -> AdapterRegistry:
    """Return an empty registry."""
    return AdapterRegistry(engine, str, is_enabled=True, reserved_names=("lmi",))


async def test_abandoned_registration_is_carried_out() -> None:
    """A client that disconnects leaves no weights behind that no call can remove."""
    engine = SlowEngine()
    registry = registry_over(engine)
    call = asyncio.create_task(registry.register(Adapter("a", "/a")))
    await engine.begun.wait()
    call.cancel()
    await asyncio.wait([call])
    engine.gate.set()
    while "a" not in registry:  # noqa: ASYNC110 (the call has no client any more)
        await asyncio.sleep(0)
    await registry.unregister("a", 1)
    assert engine.adapters == {}


async def test_parallel_registrations_of_one_name_load_once() -> None:
    """Calls for one name queue: the second finds the first one's name taken."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    calls = [registry.register(Adapter("a", f"/{number}")) for number in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] + [AdapterConflictError] * 4
    assert engine.adapters["a"].path == "/0"
    assert len(registry._names) == 0


async def test_engine_ids_are_never_used_again() -> None:
    """A name registered again is another load to the engine."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    ids = set()
    for _ in range(5):
        await registry.register(Adapter("a", "/a"))
        ids.add(engine.adapters["a"].engine_id)
        await registry.unregister("a", 1)
    assert len(ids) == 5


async def test_pin_keeps_the_load() -> None:
    """Pinning changes nothing for requests: same id, same weights."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    await registry.register(Adapter("a", "/a"))
    before = engine.adapters["a"]
    await registry.update("a", lambda one: replace(one, pin=True), 1)
    after = engine.adapters["a"]
    assert (after.engine_id, before.pinned, after.pinned) == (before.engine_id, False, True)


async def test_update_that_reads_again_leaves_running_requests_their_weights(
    tmp_path: Path,
) -> None:
    """New files are a new load and a new revision, which other replicas load, too."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"1")
    await registry.register(Adapter("a", str(tmp_path)))
    old = registry.describe("a")
    async with registry.hold("a") as held:
        weights.write_bytes(b"2")
        call = asyncio.create_task(registry.update("a", lambda one: one, 30, reads_again=True))
        while registry.describe("a").ref == old.ref:  # noqa: ASYNC110 (no event says so)
            await asyncio.sleep(0.01)
        assert not call.done()
        assert held.ref == old.ref
    await call
    new = registry.describe("a")
    assert new.ref == engine.adapters["a"]
    assert new.revision != old.revision
    await registry.update("a", lambda one: one, 1, reads_again=True)
    assert registry.describe("a") is new or registry.describe("a").ref == new.ref


async def test_update_to_files_that_are_refused_keeps_the_old_weights(tmp_path: Path) -> None:
    """The entry stays as it was, and so do the weights."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    await registry.register(Adapter("a", str(tmp_path)))
    before = registry.describe("a")
    (tmp_path / "adapter_config.json").write_text("?")
    engine.refused_adapters = {"a": "broken"}
    with pytest.raises(AdapterRefusedError, match="broken"):
        await registry.update("a", lambda one: one, 1, reads_again=True)
    assert registry.describe("a") == before
    assert engine.adapters["a"] == before.ref


async def test_update_of_code_reads_its_folders_too(tmp_path: Path) -> None:
    """What `model.py` imports counts; what Python compiles beside it does not."""
    registry = registry_over(ScriptedEngine())
    for folder in ("helpers", "__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model.py").write_text("")
    await registry.register(Adapter("a", str(tmp_path), preload=False))
    before = registry.describe("a").revision
    (tmp_path / "__pycache__" / "x.pyc").write_text("")
    await registry.update("a", lambda one: one, 1, reads_again=True)
    assert registry.describe("a").revision == before
    (tmp_path / "helpers" / "x.py").write_text("")
    await registry.update("a", lambda one: one, 1, reads_again=True)
    assert registry.describe("a").revision != before


async def test_unregister_is_bounded_by_its_timeout() -> None:
    """A request that does not end does not keep its adapter for ever."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    await registry.register(Adapter("a", "/a"))
    async with registry.hold("a") as held:
        assert held.ref is not None
        await registry.unregister("a", 0.05)
        assert engine.adapters == {}


async def test_hold_of_unknown_name_uses_the_alias() -> None:
    """Messages call an adapter what the client calls it."""
    with pytest.raises(UnknownAdapterError, match="French"):
        async with registry_over(ScriptedEngine()).hold("fr", "French"):
            pass


async def test_served_model_names_are_taken() -> None:
    """An adapter named like the base model would answer for it."""
    with pytest.raises(AdapterConflictError, match="conflicts with a served base model"):
        await registry_over(ScriptedEngine()).register(Adapter("lmi", "/a"))


async def test_failed_replacement_keeps_the_old_weights() -> None:
    """New weights that are refused leave the old ones in place."""
    engine = ScriptedEngine()
    registry = registry_over(engine)
    await registry.register(Adapter("a", "/a"))
    before = engine.adapters["a"]
    engine.refused_adapters = {"a": "broken"}
    with pytest.raises(AdapterRefusedError):
        await registry.replace(Adapter("a", "/b"), 1)
    assert engine.adapters["a"] == before
    assert registry.describe("a").src == "/a"


async def test_new_engine_gets_every_loaded_adapter() -> None:
    """After an engine restart all loaded adapters are there again, pins included."""
    registry = registry_over(ScriptedEngine())
    await registry.register(Adapter("a", "/a", pin=True))
    await registry.register(Adapter("lazy", "/b", preload=False))
    engine = ScriptedEngine()
    await registry.move_to(engine)
    assert {name: ref.pinned for name, ref in engine.adapters.items()} == {"a": True}
    async with registry.hold("a") as held:
        assert held.ref == engine.adapters["a"]


async def test_adapter_that_is_not_restored_delays_no_request() -> None:
    """One adapter lost at an engine restart: the others are there, it says why on its next use."""
    registry = registry_over(ScriptedEngine())
    await registry.register(Adapter("a", "/a"))
    await registry.register(Adapter("b", "/b"))
    engine = ScriptedEngine(refused_adapters={"a": "its folder is gone"})
    await registry.move_to(engine)
    assert set(engine.adapters) == {"b"}
    assert {adapter.name for adapter in registry} == {"a", "b"}
    with pytest.raises(AdapterRefusedError, match="its folder is gone"):
        async with registry.hold("a"):
            pass


async def test_move_waits_for_calls_and_loads_nothing_twice() -> None:
    """A call that began on the old engine and ends on the new one has loaded its adapter there."""
    old, new = ScriptedEngine(), ScriptedEngine()
    release = asyncio.Event()

    async def slow_code(name: str, _path: str, _options: object) -> Hooks:
        if name == "slow":
            await release.wait()
        return NO_HOOKS

    registry = AdapterRegistry(old, str, is_enabled=True, load_code=slow_code)
    await registry.register(Adapter("a", "/a"))
    call = asyncio.create_task(registry.register(Adapter("slow", "/s")))
    await asyncio.sleep(0)
    await registry.move_to(new)
    release.set()
    await call
    assert set(old.adapters) == {"a"}
    assert set(new.adapters) == {"a", "slow"}


class Overtaken(AdapterRegistry):
    """Another call changes the adapter after it was loaded, before the request goes on."""

    async def load_on_first_use(self, name: str, alias: str | None = None) -> Adapter:
        """Load it, then replace it as a call beside this one would."""
        loaded = await super().load_on_first_use(name, alias)
        await self.replace(Adapter(name, "/other"), 1)
        return loaded


async def test_waiting_request_uses_the_load_registered_when_it_resumes() -> None:
    """The one it waited for may be dropped by then: no request had counted on it."""
    engine = ScriptedEngine()
    registry = Overtaken(engine, str, is_enabled=True)
    await registry.register(Adapter("a", "/a", preload=False))
    async with registry.hold("a") as adapter:
        assert adapter.ref == engine.adapters["a"]
        assert adapter.path == "/other"


async def test_sources_that_hang_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that prompts and grammars need stay free, and each registration is answered."""
    monkeypatch.setattr(source_threads, "RESOLVE_SECONDS", 1.0)
    come_back = threading.Event()

    def resolve(src: str) -> str:
        if src == "/hangs":
            come_back.wait(60)
        return src

    registry = AdapterRegistry(ScriptedEngine(), resolve, is_enabled=True, reserved_names=())
    names = [f"a{number}" for number in range(40)]  # more than the loop's own threads
    calls = [asyncio.create_task(registry.register(Adapter(name, "/hangs"))) for name in names]
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(asyncio.to_thread(str), 10)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        monkeypatch.setattr(source_threads, "RESOLVE_SECONDS", 10.0)
        await registry.register(Adapter("good", "/good"))
    finally:
        come_back.set()
    assert {type(result) for result in results} == {AdapterRefusedError}
    assert "Adapter a0: its source did not answer within 1 s" in str(results[0])


async def test_as_many_sources_may_hang_as_threads_are_left_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing ends a thread that hangs: where many do, others are refused until they come back."""
    monkeypatch.setattr(source_threads, "RESOLVE_SECONDS", 0.2)
    monkeypatch.setattr(source_threads, "MAX_HANGING", 8, raising=False)
    come_back, back = threading.Event(), threading.Semaphore(0)
    hanging: list[str] = []

    def resolve(src: str) -> str:
        if src == "/hangs":
            hanging.append(src)
            come_back.wait(60)
            back.release()
        return src

    registry = AdapterRegistry(ScriptedEngine(), resolve, is_enabled=True, reserved_names=())
    try:
        for turn in range(4):
            calls = [registry.register(Adapter(f"a{turn}{n}", "/hangs")) for n in range(4)]
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        with pytest.raises(AdapterRefusedError, match="8 sources of adapters do not answer"):
            await registry.register(Adapter("good", "/good"))
        assert len(hanging) == 8
    finally:
        come_back.set()
    for _ in hanging:
        assert await asyncio.to_thread(back.acquire, timeout=10)
    monkeypatch.setattr(source_threads, "RESOLVE_SECONDS", 10.0)
    await asyncio.wait_for(registry.register(Adapter("good", "/good")), 10)


async def test_adapter_that_is_evicted_before_it_is_held_is_found_again() -> None:
    """Another's load took its place between the look-up and the hold; then 503, never unknown."""
    registry = registry_over(ScriptedEngine())
    found: list[str] = []

    async def find(name: str) -> bool:
        found.append(name)
        if name != "a":
            return False
        await registry.register(Adapter(name, "/a", path="/a", is_from_store=True))
        if len(found) != MAX_FINDS:
            await registry.unregister(name, 1, only_from_store=True)
        return True

    hook(registry, find=find)
    async with registry.hold("a") as adapter:
        assert adapter.ref is not None
    await registry.unregister("a", 1)
    with pytest.raises(NotReadyError, match="was evicted"):
        async with registry.hold("a"):
            pass
    assert len(found) == 2 * MAX_FINDS
    with pytest.raises(UnknownAdapterError):
        async with registry.hold("b"):
            pass
    assert found[-1:] == ["b"]
    assert len(found) == 2 * MAX_FINDS + 1


async def test_store_that_hangs_holds_up_no_other_place() -> None:
    """40 adapters of a store that does not answer: a local one is registered at once."""
    come_back = threading.Event()

    def resolve(src: str) -> str:
        if "slow" in src:
            come_back.wait(60)
        return src

    registry = AdapterRegistry(ScriptedEngine(), resolve, is_enabled=True, reserved_names=())
    hanging = [
        asyncio.create_task(registry.register(Adapter(f"a{n}", f"s3://slow/{n}")))
        for n in range(40)
    ]
    others = [
        asyncio.create_task(registry.register(Adapter(f"b{n}", f"s3://slow-{n}/x")))
        for n in range(20)
    ]
    try:
        await asyncio.sleep(0)
        for src in ("/local", "file:///local"):
            await asyncio.wait_for(registry.register(Adapter(f"good{len(src)}", src)), 10)
        assert not any(task.done() for task in hanging + others)
    finally:
        come_back.set()
    await asyncio.gather(*hanging, *others)
    await registry.register(Adapter("fast", "s3://fast/x"))


@pytest.mark.parametrize(
    ("src", "place"),
    [("/a", ""), ("./a/b", ""), ("file:///a", ""), ("a", ""), ("s3://b/c/d", "s3://b"),
     ("a/b", "hub")],
)  # fmt: skip
def test_places_hang_as_a_whole(src: str, place: str) -> None:
    """A bucket, the hub, and what is local."""
    assert source_threads.place_of(src) == place
