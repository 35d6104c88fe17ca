"""What the first process keeps for the others: slots, and what is done in one place."""

from pathlib import Path
from typing import cast

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import MAX_FINDS, AdapterRegistry
from lmi_vllm.errors import EngineDeadError, Fault, NotReadyError, UnknownAdapterError
from lmi_vllm.features.front_ends.channel import FailureCounted, StateChanged, TelemetryLine
from lmi_vllm.features.front_ends.first import EngineClients, FirstProcess, SharedEngine
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from tests.support.adapter_hooks import hook


def test_replacement_process_gets_an_unused_slot(tmp_path: Path) -> None:
    """What replaces a lost process gets another slot, until all are used up."""
    clients = EngineClients(tmp_path, 4)
    assert [client.index for client in clients.new()] == [0, 1, 2, 3]
    assert (clients.take(), clients.take(), clients.is_exhausted) == (1, 2, False)
    assert (clients.take(), clients.is_exhausted) == (3, True)
    assert clients.of(3).index == 3


def test_next_engine_has_free_slots_again(tmp_path: Path) -> None:
    """But for those whose processes live on; its sockets are in a folder of their own."""
    clients = EngineClients(tmp_path, 4)
    first = clients.new()
    clients.take()
    clients.begin([2])
    assert (clients.take(), clients.take(), clients.is_exhausted) == (1, 3, True)
    assert not {client.input_address for client in clients.new()} & {
        client.input_address for client in first
    }


def service() -> InferenceService:
    """Return a service without a model."""
    return InferenceService(RequestQueue(Lifecycle(), 7))


def test_errors_of_other_front_ends_are_counted() -> None:
    """What is answered counts for the one health; SageMaker's lines are written by one process."""
    made, lines, causes = service(), [], []
    made.lifecycle.on_failure.append(causes.append)
    made.telemetry.on_line.append(lines.append)
    first = FirstProcess(made)
    first.note(TelemetryLine("a line"))
    assert (lines, causes) == (["a line"], [])
    first.note(FailureCounted(Fault.ENGINE))
    first.note(FailureCounted(503))
    assert causes == [Fault.ENGINE, 503]
    made.lifecycle.set_state(State.HEALTHY)
    assert first.state() == StateChanged(State.HEALTHY, 7, has_model=True)


async def test_adapter_that_makes_room_before_it_is_used_is_found_again() -> None:
    """For another process as for a request of this one: 503 in the end, and not unknown."""
    registry = AdapterRegistry(ScriptedEngine(), str, is_enabled=True)
    found: list[str] = []

    async def find(name: str) -> bool:
        found.append(name)
        await registry.register(Adapter(name, f"/{name}", path="/", is_from_store=True))
        if len(found) != MAX_FINDS:
            await registry.unregister(name, 1, only_from_store=True)
        return name != "unknown"

    hook(registry, find=find)
    first = FirstProcess(service())
    first.use(cast(SharedEngine, registry), registry)
    await first.load("fr")
    assert "fr" in registry
    with pytest.raises(NotReadyError, match="de was evicted"):
        await first.load("de")
    assert found == ["fr"] * MAX_FINDS + ["de"] * MAX_FINDS
    with pytest.raises(UnknownAdapterError):
        await first.load("unknown")
    assert len(found) == 2 * MAX_FINDS + 1


async def test_without_an_engine_adapters_cannot_be_had() -> None:
    """A request of another process that asks meanwhile fails as one of ours would."""
    first = FirstProcess(service())
    with pytest.raises(EngineDeadError):
        async with first.hold(1):
            pass
    with pytest.raises(EngineDeadError):
        await first.load("a")
    await first.abort(["r"])  # nothing is left that could be ended
    assert first.adapters == ()
