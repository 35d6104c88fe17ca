"""The series that endpoint pickers read: those of now, with the names of requests."""

import asyncio
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import ActiveAdapters, ResidentAdapter
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.features.lora_series import series as module
from lmi_vllm.features.lora_series.series import (
    IN_MEMORY,
    LOADED,
    NAME,
    SLOTS,
    WITH_SLOT,
    showing_adapters,
)
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.metrics import Collectable

AT_WORK = ActiveAdapters(4, ("de", "fr"), ("it",))


class Loaded(InferenceService):
    """A service with an engine, of which only the metrics are asked."""

    @property
    def loaded_engine(self) -> ScriptedEngine:
        """An engine with adapters at work."""
        return ScriptedEngine(active_adapters=self.active)

    active = AT_WORK


@pytest.fixture
def service() -> Loaded:
    """A service over a registry that has vLLM's series of two combinations."""
    found = CollectorRegistry()
    labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
    info = Gauge(NAME, "", labels, registry=found)
    info.labels("4", "", "fr@1003").set(5)
    info.labels("4", "", "").set(6)
    Gauge("vllm:num_requests_waiting", "", registry=found).set(3)
    made = Loaded(RequestQueue(Lifecycle(), 9))

    def series(names: Sequence[str]) -> Collectable:
        return found.restricted_registry(names) if names else found

    made.telemetry.series = series
    return made


async def shown(service: InferenceService, *names: str) -> str:
    """Return what /metrics shows."""
    async with showing_adapters(service, Settings(), {}, ServerEvents()):
        return generate_latest(service.telemetry.series(names)).decode()


async def test_one_series_has_the_names_of_requests(service: Loaded) -> None:
    """In the place of all of vLLM's; what else there is stays."""
    text = await shown(service)
    lines = [line for line in text.splitlines() if line.startswith(NAME)]
    (line,) = lines
    head, _, value = line.rpartition(" ")
    assert head == (
        f'{NAME}{{max_lora="4",running_lora_adapters="de,fr",waiting_lora_adapters="it"}}'
    )
    assert float(value) > 1.7e9
    assert "vllm:num_requests_waiting 3.0" in text


@pytest.mark.parametrize("names", [(), ("vllm:num_requests_waiting",)])
async def test_requests_that_wait_for_a_slot_are_waiting(
    service: Loaded, names: tuple[str, ...]
) -> None:
    """The scheduler of vLLM does not know of them."""
    service.active = ActiveAdapters(4, ("de", "fr"), ("it",), queued=2)
    assert "vllm:num_requests_waiting 5.0" in await shown(service, *names)


async def test_it_can_be_asked_for_by_name_and_left_out(service: Loaded) -> None:
    """As every series."""
    assert "running_lora_adapters" in await shown(service, NAME)
    assert "running_lora_adapters" not in await shown(service, "vllm:num_requests_waiting")


RANKS = (
    (ResidentAdapter("fr", True), ResidentAdapter("it", False), ResidentAdapter("nl", True, True)),
    (ResidentAdapter("nl", True, True),),
)


async def test_adapters_that_the_workers_hold(service: Loaded) -> None:
    """Of each rank, with vLLM's coming names; an idle one with a slot is ready for requests."""
    service.active = ActiveAdapters(4, ("de",), ("it",), RANKS, "/models/m")
    text = await shown(service)
    rows = [line for line in text.splitlines() if line.startswith((LOADED, SLOTS, "vllm:num_"))]
    rank = 'engine="{}",model_name="/models/m"'
    row = '{}{{adapter_name="{}",{},level="{}",model_name="/models/m",pinned="{}"}} 1.0'
    assert sorted(rows) == sorted(
        [
            row.format(LOADED, "fr", 'engine="0"', "gpu", "false"),
            row.format(LOADED, "it", 'engine="0"', "cpu", "false"),
            row.format(LOADED, "nl", 'engine="0"', "gpu", "true"),
            row.format(LOADED, "nl", 'engine="1"', "gpu", "true"),
            f"{WITH_SLOT}{{{rank.format(0)}}} 2.0",
            f"{WITH_SLOT}{{{rank.format(1)}}} 1.0",
            f"{IN_MEMORY}{{{rank.format(0)}}} 3.0",
            f"{IN_MEMORY}{{{rank.format(1)}}} 1.0",
            f"{SLOTS}{{{rank.format(0)}}} 4.0",
            f"{SLOTS}{{{rank.format(1)}}} 4.0",
            "vllm:num_requests_waiting 3.0",
        ]
    )
    assert 'running_lora_adapters="de,fr,nl"' in text
    assert 'waiting_lora_adapters="it"' in text
    assert (await shown(service, SLOTS)).count("\n") == 4  # two rows and their description


async def test_no_more_adapters_are_shown_than_a_bound(service: Loaded) -> None:
    """Those with a slot first; the count has all of them."""
    names = [f"a{number:04}" for number in range(module.MOST_SHOWN + 5)]
    rank = tuple(ResidentAdapter(name, name == names[-1]) for name in names)
    service.active = ActiveAdapters(4, ranks=(rank,), model="/models/m")
    text = await shown(service)
    rows = [line for line in text.splitlines() if line.startswith(LOADED + "{")]
    assert len(rows) == module.MOST_SHOWN
    assert f'adapter_name="{names[-1]}",engine="0",level="gpu"' in rows[0]
    assert f'{IN_MEMORY}{{engine="0",model_name="/models/m"}} {len(names)}.0' in text


async def test_the_loaded_engine_is_asked_again_and_again(
    service: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is gone is passed over, and the next one is asked."""
    monkeypatch.setattr(module, "READ_SECONDS", 0)
    asked = asyncio.Event()
    failures = [EngineDeadError()]

    async def read(_: ScriptedEngine) -> None:
        if failures:
            raise failures.pop()
        asked.set()

    monkeypatch.setattr(ScriptedEngine, "read_adapters", read)
    async with showing_adapters(service, Settings(), {}, ServerEvents()):
        await asyncio.wait_for(asked.wait(), 10)


async def test_engine_without_lora_has_no_series(service: Loaded) -> None:
    """A router takes a server without the series for one without adapters."""
    service.active = ActiveAdapters()
    text = await shown(service)
    assert all(name not in text for name in module.NAMES)
