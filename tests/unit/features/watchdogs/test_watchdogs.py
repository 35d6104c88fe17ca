"""A stall is requests without a step, not silence."""

import asyncio
from collections.abc import AsyncGenerator, Iterable

import pytest

from lmi_vllm.clock import Clock
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.features.watchdogs.watchdogs import (
    ANSWER_CHECK_SECONDS,
    MODEL_CORRUPTED,
    AnswerWatchdog,
    StallWatchdog,
)
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.messages import GenerationChunk, GenerationJob
from tests.server.conftest import ManualClock
from tests.unit.conftest import ExplainRun

SECONDS = 0.08


class StuckEngine(ScriptedEngine):
    """Gives its token only once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Wait, then answer."""
        await self.go.wait()
        async for chunk in super().generate(job):
            yield chunk


async def reaches(lifecycle: Lifecycle, state: State) -> bool:
    """Whether `state` comes, in a generous time."""
    for _ in range(500):
        if lifecycle.state is state:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture
def lifecycle() -> Lifecycle:
    """The lifecycle of a healthy server."""
    found = Lifecycle()
    found.set_state(State.HEALTHY)
    return found


async def test_idle_engine_is_healthy(lifecycle: Lifecycle) -> None:
    """Nothing to do is no stall."""
    watch = asyncio.create_task(StallWatchdog(ScriptedEngine(), lifecycle, SECONDS, Clock()).run())
    await asyncio.sleep(SECONDS * 5)
    assert lifecycle.state is State.HEALTHY
    watch.cancel()


async def test_steps_keep_it_healthy(lifecycle: Lifecycle) -> None:
    """A long generation is no stall as long as steps come."""
    engine = ScriptedEngine(running_requests=1)
    watch = asyncio.create_task(StallWatchdog(engine, lifecycle, 0.4, Clock()).run())
    for _ in range(20):
        engine.progress += 1
        await asyncio.sleep(0.05)
        assert lifecycle.state is State.HEALTHY
    watch.cancel()


async def test_requests_without_steps_are_a_stall(lifecycle: Lifecycle) -> None:
    """Health goes with the stall and comes back with the next step."""
    engine = ScriptedEngine(running_requests=1)
    watch = asyncio.create_task(StallWatchdog(engine, lifecycle, SECONDS, Clock()).run())
    assert await reaches(lifecycle, State.UNHEALTHY)
    engine.progress += 1
    assert await reaches(lifecycle, State.HEALTHY)
    watch.cancel()


class StoppingClock(Clock):
    """Tells these times, one at each look; then it sleeps for good."""

    def __init__(self, *times: float) -> None:
        self._times = [*times]

    def now(self) -> float:
        """Return the next time."""
        return self._times.pop(0)

    async def sleep(self, seconds: float) -> None:
        """Wait until there is no other time."""
        await (asyncio.sleep(0) if self._times else asyncio.Event().wait())


@pytest.mark.parametrize(("last", "state"), [(480, State.HEALTHY), (490, State.UNHEALTHY)])
async def test_pause_of_the_whole_server_is_no_stall(
    lifecycle: Lifecycle, last: float, state: State
) -> None:
    """As of `docker pause`: the engine has had no time for a step; a stall after it is one."""
    clock = StoppingClock(0, 0, 30, 430, 460, last)
    watchdog = StallWatchdog(ScriptedEngine(running_requests=1), lifecycle, 90, clock, 300)
    watch = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0.05)
    watch.cancel()
    assert lifecycle.state is state


async def test_stalled_engine_without_requests_is_asked_for_a_token(lifecycle: Lifecycle) -> None:
    """No other request is admitted while it is unhealthy."""
    engine = StuckEngine()
    engine.running_requests = 1
    watch = asyncio.create_task(StallWatchdog(engine, lifecycle, SECONDS, Clock()).run())
    assert await reaches(lifecycle, State.UNHEALTHY)
    engine.running_requests = 0  # it timed out
    await asyncio.sleep(SECONDS * 5)
    assert lifecycle.state is State.UNHEALTHY
    engine.go.set()
    assert await reaches(lifecycle, State.HEALTHY)
    watch.cancel()


class SpoiltEngine(ScriptedEngine):
    """Fails its jobs from a certain one on, as numbers that are not finite do, or otherwise."""

    is_corrupted = False
    fails = False

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Fail, or answer."""
        if self.is_corrupted or self.fails:
            self.jobs.append(job)
            self.not_finite += self.is_corrupted
            raise EngineFailureError("not finite")
        async for chunk in super().generate(job):
            yield chunk


async def test_a_model_that_cannot_answer_any_more_is_corrupted() -> None:
    """A request of its own that was not finite makes it be asked; the answer decides."""
    engine, clock = SpoiltEngine(), ManualClock()
    running = asyncio.create_task(AnswerWatchdog(engine, clock).run())
    await clock.advance(10 * ANSWER_CHECK_SECONDS)
    assert not engine.jobs
    engine.not_finite = 1  # one prompt: the model itself is well
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    assert (len(engine.jobs), running.done()) == (1, False)
    engine.fails, engine.not_finite = True, 2  # it cannot answer, for another reason
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    assert (len(engine.jobs), running.done()) == (2, False)
    engine.is_corrupted, engine.not_finite = True, 3
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    assert await asyncio.wait_for(running, 1) == MODEL_CORRUPTED


def test_restart_timeout_without_a_watch_is_named(explained: ExplainRun) -> None:
    """No stall is seen with LMI_STALL_TIMEOUT=0, so none is an engine failure."""
    asked = {"LMI_STALL_TIMEOUT": "0", "LMI_STALL_RESTART_TIMEOUT": "60"}
    assert _about_restart(explained("", asked).warnings) == [
        "LMI_STALL_RESTART_TIMEOUT=60 has no effect with LMI_STALL_TIMEOUT=0"
    ]
    for usual in ({"LMI_STALL_RESTART_TIMEOUT": "60"}, {"LMI_STALL_TIMEOUT": "0"}):
        assert not _about_restart(explained("", usual).warnings)


def _about_restart(warnings: Iterable[str]) -> list[str]:
    return [text for text in warnings if "LMI_STALL_RESTART_TIMEOUT" in text]
