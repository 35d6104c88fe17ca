"""The server's part in further processes at its port; a stand-in takes the place of these."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import EngineStartError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import ServingProfile
from lmi_vllm.server.context import ProcessGroup, ServerContext, ServerEvents, new_service
from lmi_vllm.server.model_manager import ModelManager
from lmi_vllm.server.supervisor import FRONT_ENDS_DIED, RESTART_PAUSE_SECONDS, Outcome
from tests.server.conftest import Engines, ManualClock, until
from tests.support.assembled import CONFIGURATION, PARTS, load_settings


class Processes(ProcessGroup):
    """A stand-in that records what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.refusals: list[EngineStartError] = []

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Join, unless a refusal is due."""
        self.asked.append("join")
        self.failed.clear()
        if self.refusals:
            raise self.refusals.pop()

    def engine_died(self) -> None:
        """Record the call."""
        self.asked.append("engine died")

    async def detach(self) -> None:
        """Record the call."""
        self.asked.append("detach")


class RunningModel:
    """A model whose engine is restarted when it fails, without a port."""

    def __init__(self, engines: Engines, environ: dict[str, str]) -> None:
        typed = CommandLine(model="some/model")
        settings = load_settings(environ, typed)
        self.clock, self.processes = ManualClock(), Processes()
        self.service = new_service(settings, self.clock)
        context = ServerContext(
            CONFIGURATION, PARTS.start, self.service, environ, {}, engines, self.processes,
            self.clock, ServerEvents(),
        )  # fmt: skip
        self._keeper = ModelManager(
            context, settings, typed, PARTS.without_model.value, PARTS.model_parts
        )
        self.run = asyncio.create_task(self._keeper.run("http://h", "curl"))

    async def became(self, state: State) -> None:
        """Return when the server is in that state."""
        await until(lambda: self.service.lifecycle.state is state)


@pytest.fixture
async def running(engines: Engines) -> AsyncIterator[RunningModel]:
    """A model whose engine is replaced once."""
    made = RunningModel(engines, {"SERVING_RETRY_THRESHOLD": "1"})
    await made.became(State.HEALTHY)
    yield made
    made.run.cancel()


async def test_they_leave_a_dead_engine_and_join_the_next(
    running: RunningModel, engines: Engines
) -> None:
    """Each of them hears of the death, and is out before the next engine starts."""
    engines.started[0].die()
    await running.became(State.PENDING)
    await running.clock.advance(RESTART_PAUSE_SECONDS)
    await running.became(State.HEALTHY)
    assert running.processes.asked == ["join", "engine died", "detach", "join"]


async def test_too_many_lost_processes_are_a_failure_of_the_engine(
    running: RunningModel, engines: Engines
) -> None:
    """Its slots are used up: another engine has new ones, within the threshold."""
    running.processes.failed.set()
    await running.became(State.PENDING)
    await running.clock.advance(RESTART_PAUSE_SECONDS)
    await running.became(State.HEALTHY)
    # Requests in flight were answered first: those that are left run in the engine.
    assert running.processes.asked == ["join", "engine died", "detach", "join"]
    assert len(engines.started) == 2
    assert engines.started[0].is_closed
    running.processes.failed.set()
    assert await running.run == Outcome(1, FRONT_ENDS_DIED)


async def test_a_process_that_cannot_join_fails_the_start(
    running: RunningModel, engines: Engines
) -> None:
    """The engine that it could not join is closed, and nothing stays attached."""
    running.processes.refusals = [EngineStartError("a front-end process did not start: x")]
    engines.started[0].die()
    await running.became(State.PENDING)
    await running.clock.advance(RESTART_PAUSE_SECONDS)
    assert await running.run == Outcome(1, "a front-end process did not start: x")
    assert [engine.is_closed for engine in engines.started] == [True, True]
    assert running.processes.asked[-2:] == ["join", "detach"]
