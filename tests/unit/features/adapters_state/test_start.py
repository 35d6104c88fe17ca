"""What a server that shares its adapters says of it: in the metrics, and in /ping and /ready."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import cast

import pytest
from prometheus_client import REGISTRY

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterRefusedError, NotReadyError, UnknownAdapterError
from lmi_vllm.features.adapter_store.start import ColdRequests, ForwardedFind
from lmi_vllm.features.adapters_state import reconciler, sharing, start
from lmi_vllm.features.adapters_state.start import Replica
from lmi_vllm.features.front_ends.first import FirstProcess, SharedEngine
from lmi_vllm.features.front_ends.mirrored_adapters import MirroredAdapters
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.server.context import ModelContext
from tests.support.adapter_hooks import hook
from tests.support.assembled import AdapterSources, load_settings, model_context
from tests.support.s3_server import BUCKET, S3Server
from tests.unit.features.adapters_state.conftest import AWAY, KEY, Start

AGE = "lmi_adapters_state_age_seconds"
MISSING = "lmi_adapters_state_missing"
REFRESH_SECONDS = 0.05


@dataclass
class Running:
    """A server whose adapters are shared, as far as the feature knows it."""

    model: ModelContext
    refused: set[str] = field(default_factory=set)
    gate: threading.Event | None = None  # what sources wait for

    async def begin(self) -> AdapterRegistry:
        """Have what is shared, as a model's start does."""
        registry = AdapterRegistry(
            ScriptedEngine(),
            self._resolve,
            is_enabled=True,
            hooks=lambda made: self.model.adapter_hooks(made, AdapterSources({})),
        )
        for begin in registry.hooks.begin:
            await begin()
        return registry

    @property
    def detail(self) -> str:
        """Return what /ping and /ready say of it."""
        return self.model.service.lifecycle.ping_details.get(start.PING_DETAIL, "")

    def _resolve(self, src: str) -> str:
        if self.gate is not None:
            self.gate.wait(60)
        if src in self.refused:
            raise AdapterRefusedError(f"{src} is not here")
        return src


@pytest.fixture
async def running(empty_store: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """It, with all its periods short."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(start, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(sharing, "READY_SECONDS", 0.0)
    monkeypatch.setattr(reconciler, "FIRST_RETRY_SECONDS", 0.01)
    options = {
        "OPTION_ADAPTERS_STATE": f"s3://{BUCKET}/{KEY}",
        "OPTION_ADAPTERS_STATE_REFRESH_SECONDS": str(REFRESH_SECONDS),
    }
    settings = load_settings(options)
    model = model_context(settings, empty_store.environ)
    await model.enter([start.keeping_adapters])
    yield Running(model)
    await model.leave()


def value(name: str) -> float:
    """Return the value of a metric."""
    return REGISTRY.get_sample_value(name) or 0.0


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_age_grows_while_the_state_is_unreachable(
    running: Running, empty_store: S3Server
) -> None:
    """Until it has been read again; the server stays ready."""
    await running.begin()
    empty_store.refusal = AWAY
    await until(lambda: value(AGE) > 10 * REFRESH_SECONDS and running.detail != "")
    assert running.detail.startswith("unreachable for ")
    empty_store.refusal = None
    await until(lambda: 0 < value(AGE) < 10 * REFRESH_SECONDS and running.detail == "")


async def test_start_that_waits_for_the_state_says_so(
    running: Running, empty_store: S3Server
) -> None:
    """A server that is not ready has a reason."""
    empty_store.refusal = AWAY
    begun = asyncio.create_task(running.begin())
    await until(lambda: running.detail != "" and value(AGE) > REFRESH_SECONDS)
    assert not begun.done()
    empty_store.refusal = None
    await asyncio.wait_for(begun, 60)
    await until(lambda: running.detail == "")


async def test_start_that_loads_for_long_is_not_unreachable(running: Running, start: Start) -> None:
    """The state is read again and again meanwhile."""
    other = await start("other").begin()
    await other.registry.register(Adapter("fr", "/fr"))
    running.gate = threading.Event()
    begun = asyncio.create_task(running.begin())
    try:
        await asyncio.sleep(3.0)
        assert not begun.done()
        assert value(AGE) < 2.5
    finally:
        running.gate.set()
    await asyncio.wait_for(begun, 60)


async def test_further_process_asks_the_first_for_unknown_names(running: Running) -> None:
    """The first one shares the adapters, and knows which are about to be loaded."""
    registry = AdapterRegistry(
        ScriptedEngine(),
        str,
        is_enabled=True,
        hooks=lambda made: running.model.adapter_hooks(made, None),
    )
    asked = []

    async def ask(name: str, _alias: str | None = None) -> Adapter:
        asked.append(name)
        raise UnknownAdapterError(name)

    registry.load_on_first_use = ask  # type: ignore[method-assign]
    with pytest.raises(UnknownAdapterError):
        async with registry.hold("fr"):
            pass
    assert set(asked) == {"fr"}


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("name", ["fr", "team/fr"], ids=["folder", "no folder"])
async def test_further_process_waits_as_the_first_does(
    running: Running, start: Start, name: str, has_store: bool
) -> None:
    """For an adapter that another server's call has registered; then 503, as long as it cannot."""
    other, registry = await start("other").begin(), await running.begin()
    first = FirstProcess(running.model.service)
    first.use(cast(SharedEngine, registry), registry)
    replica = Replica(running.model)

    def hooks(made: AdapterRegistry) -> AdapterHooks:
        of_store = ForwardedFind(made, ColdRequests()) if has_store else None
        return AdapterHooks(of_store) | replica.keep(made, None)

    further = MirroredAdapters(ScriptedEngine(), first.load, is_enabled=True, hooks=hooks)

    async def publish(adapters: Collection[Adapter], _: float) -> None:
        await further.follow(adapters)

    hook(registry, publish=publish)
    running.gate = threading.Event()
    await other.registry.register(Adapter(name, "/fr"))
    await until(lambda: value(MISSING) == 1)
    asking = asyncio.create_task(source(further, name))
    await asyncio.sleep(0.1)
    assert not asking.done()
    running.gate.set()
    assert await asyncio.wait_for(asking, 60) == "/fr"
    running.refused.add("/de")
    await other.registry.register(Adapter(f"{name}-2", "/de"))
    await until(lambda: value(MISSING) == 1)
    with pytest.raises(NotReadyError, match="has not loaded it yet"):
        await source(further, f"{name}-2")


async def source(registry: AdapterRegistry, name: str) -> str:
    """Return the source of the adapter that a request gets."""
    async with registry.hold(name) as adapter:
        return adapter.src


async def test_adapters_that_are_missing_are_counted(running: Running, start: Start) -> None:
    """Those that others have and this one cannot load, until it can."""
    other = await start("other").begin()
    for name in ("fr", "de", "it"):
        await other.registry.register(Adapter(name, f"/{name}"))
    running.refused |= {"/fr", "/de"}
    await running.begin()
    await until(lambda: value(MISSING) == 2)
    running.refused.discard("/fr")
    await until(lambda: value(MISSING) == 1)
    running.refused.clear()
    await until(lambda: value(MISSING) == 0)
