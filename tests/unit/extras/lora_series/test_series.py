"""The series that endpoint pickers read: one, of now, with the names of requests."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import ActiveAdapters
from lmi_vllm.extras.lora_series.series import NAME, showing_adapters
from lmi_vllm.extras.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.metrics import Collectable
from tests.support.assembled import SOURCES

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
    async with showing_adapters(service, Settings(), {}, ServerEvents(SOURCES)):
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


async def test_it_can_be_asked_for_by_name_and_left_out(service: Loaded) -> None:
    """As every series."""
    assert "running_lora_adapters" in await shown(service, NAME)
    assert "running_lora_adapters" not in await shown(service, "vllm:num_requests_waiting")


async def test_engine_without_lora_has_no_series(service: Loaded) -> None:
    """A router takes a server without the series for one without adapters."""
    service.active = ActiveAdapters()
    assert NAME not in await shown(service)
