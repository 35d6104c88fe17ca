"""A stall is requests without a step, not silence."""

import asyncio
import io
import wave
from collections.abc import AsyncGenerator

import pytest

from lmi_vllm.clock import Clock
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.scripted import ScriptedEngine
from lmi_vllm.errors import EngineFailureError, StartupError
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.messages import GenerationChunk, GenerationJob, HttpCall, OpenAIReply
from lmi_vllm.server.liveness import ANSWER_CHECK_SECONDS, AnswerWatchdog, StallWatchdog, warm_up
from tests.server.conftest import ManualClock
from tests.support.scripted_application import ScriptedApplication

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


async def test_stalled_engine_without_requests_is_asked_for_a_token(lifecycle: Lifecycle) -> None:
    """Nobody else may ask it while it is unhealthy."""
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


async def test_zero_is_off(lifecycle: Lifecycle) -> None:
    """LMI_STALL_TIMEOUT=0."""
    await StallWatchdog(ScriptedEngine(running_requests=1), lifecycle, 0, Clock()).run()
    assert lifecycle.state is State.HEALTHY


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
    watch = AnswerWatchdog(engine, clock)
    running = asyncio.create_task(watch.run())
    await clock.advance(10 * ANSWER_CHECK_SECONDS)
    assert not engine.jobs
    engine.not_finite = 1  # one prompt: the model itself is well
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    assert (len(engine.jobs), watch.corrupted.is_set()) == (1, False)
    engine.fails, engine.not_finite = True, 2  # it cannot answer, for another reason
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    assert (len(engine.jobs), watch.corrupted.is_set()) == (2, False)
    engine.is_corrupted, engine.not_finite = True, 3
    await clock.advance(2 * ANSWER_CHECK_SECONDS)
    await asyncio.wait_for(running, 1)
    assert watch.corrupted.is_set()


class Hearing(ScriptedApplication):
    """Answers a transcription with a status, and keeps what it was sent."""

    status = 200
    call_seen: HttpCall | None = None

    async def call(self, call: HttpCall, _: object = None) -> OpenAIReply:
        """Return an answer."""
        self.call_seen = call
        return OpenAIReply(self.status, b"soundfile is missing")


async def test_a_model_that_only_hears_is_proven_by_a_silence() -> None:
    """A sound file as any client uploads one; what refuses it ends the start by its own words."""
    engine = ScriptedEngine(task="transcription")
    engine.http = application = Hearing(engine)
    await warm_up(engine)
    assert application.call_seen is not None
    _, _, file = application.call_seen.body.partition(b"\r\n\r\n")
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (16000, 1600)
    application.status = 500
    with pytest.raises(StartupError, match="soundfile is missing"):
        await warm_up(engine)
