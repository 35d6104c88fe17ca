"""A stall is requests without a step, not silence."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.scripted import ScriptedEngine
from lmi_vllm.inference.admission import Admission, State
from lmi_vllm.messages import GenerationChunk, GenerationJob
from lmi_vllm.server.stall_watch import StallWatch

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


async def become(admission: Admission, state: State) -> bool:
    """Whether `state` comes, in a generous time."""
    for _ in range(500):
        if admission.state is state:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture
def admission() -> Admission:
    """An admission of a healthy server."""
    found = Admission()
    found.become(State.HEALTHY)
    return found


async def test_idle_engine_is_healthy(admission: Admission) -> None:
    """Nothing to do is no stall."""
    watch = asyncio.create_task(StallWatch(ScriptedEngine(), admission, SECONDS).run())
    await asyncio.sleep(SECONDS * 5)
    assert admission.state is State.HEALTHY
    watch.cancel()


async def test_steps_keep_it_healthy(admission: Admission) -> None:
    """A long generation is no stall as long as steps come."""
    engine = ScriptedEngine(running_requests=1)
    watch = asyncio.create_task(StallWatch(engine, admission, 0.4).run())
    for _ in range(20):
        engine.progress += 1
        await asyncio.sleep(0.05)
        assert admission.state is State.HEALTHY
    watch.cancel()


async def test_requests_without_steps_are_a_stall(admission: Admission) -> None:
    """Health goes with the stall and comes back with the next step."""
    engine = ScriptedEngine(running_requests=1)
    watch = asyncio.create_task(StallWatch(engine, admission, SECONDS).run())
    assert await become(admission, State.UNHEALTHY)
    engine.progress += 1
    assert await become(admission, State.HEALTHY)
    watch.cancel()


async def test_stalled_engine_without_requests_is_asked_for_a_token(admission: Admission) -> None:
    """Nobody else may ask it while it is unhealthy."""
    engine = StuckEngine()
    engine.running_requests = 1
    watch = asyncio.create_task(StallWatch(engine, admission, SECONDS).run())
    assert await become(admission, State.UNHEALTHY)
    engine.running_requests = 0  # it timed out
    await asyncio.sleep(SECONDS * 5)
    assert admission.state is State.UNHEALTHY
    engine.go.set()
    assert await become(admission, State.HEALTHY)
    watch.cancel()


async def test_zero_is_off(admission: Admission) -> None:
    """LMI_STALL_TIMEOUT=0."""
    await StallWatch(ScriptedEngine(running_requests=1), admission, 0).run()
    assert admission.state is State.HEALTHY
