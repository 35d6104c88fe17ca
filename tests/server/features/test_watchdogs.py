"""An engine that hangs, or whose numbers are not finite any more, is replaced."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.features.watchdogs.watchdogs import (
    ANSWER_CHECK_SECONDS,
    ENGINE_HUNG,
    IDLE_ENGINE_REFUSES,
    MODEL_CORRUPTED,
)
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import AdapterRef, GenerationChunk, GenerationJob
from tests.server.conftest import (
    REAL_SECONDS,
    WARM_UP_JOBS,
    Engines,
    Serve,
    Slow,
    restarted,
    until,
)


async def test_a_stalled_engine_is_unhealthy_until_its_next_step(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """LMI_STALL_TIMEOUT: requests and no step turn health bad; the next step brings it back."""
    server = await (await serve(LMI_STALL_TIMEOUT="8")).ready()
    engine = engines.started[0]
    engine.running_requests = 1
    await server.clock.advance(20)
    assert (await server.ping())[0] == 503
    assert server.state is State.UNHEALTHY
    assert "LMI_STALL_TIMEOUT" in caplog.text
    engine.progress += 1
    await server.clock.advance(2)
    assert (await server.ping())[0] == 200
    engine.running_requests = 0


async def test_a_sleeping_engine_does_not_stall(serve: Serve, engines: Engines) -> None:
    """It may keep requests for when it is woken; then the time starts again."""
    server = await (await serve(LMI_STALL_TIMEOUT="8")).ready()
    engine = engines.started[0]
    server.set_asleep(is_asleep=True)
    engine.running_requests = 1
    await server.clock.advance(100)
    assert server.state is State.ASLEEP
    server.set_asleep(is_asleep=False)
    await server.clock.advance(2)
    assert server.state is State.HEALTHY
    await server.clock.advance(20)
    assert server.state is State.UNHEALTHY
    engine.running_requests = 0


class HangingLoad(Slow):
    """Never answers the call that loads an adapter, unless it dies."""

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Hang, as an engine that counts the call among what it holds."""
        self.running_requests += 1
        await self.wait_until_dead()
        self.running_requests -= 1
        await self.check_health()


async def test_an_engine_that_hangs_is_replaced(serve: Serve, engines: Engines) -> None:
    """A stall of 3 times LMI_STALL_TIMEOUT is a failure: its requests fail, the next one serves."""
    first = Slow()
    engines.script = [first]
    server = await (await serve(LMI_STALL_TIMEOUT="8", SERVING_RETRY_THRESHOLD="1")).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    await server.clock.advance(20)
    assert server.state is State.UNHEALTHY
    assert not first.is_closed
    await server.clock.advance(4)
    assert await asyncio.wait_for(request, REAL_SECONDS) == 500
    await restarted(server, 2)
    assert first.is_closed
    assert await server.infer() == 200


async def test_an_engine_that_hangs_ends_the_server_without_a_threshold(
    serve: Serve, engines: Engines
) -> None:
    """As one that died: exit code 1, and the reason last; LMI_STALL_RESTART_TIMEOUT says when."""
    engines.script = [Slow()]
    server = await (await serve(LMI_STALL_TIMEOUT="8", LMI_STALL_RESTART_TIMEOUT="80")).ready()
    engines.started[0].running_requests = 1
    await server.clock.advance(70)
    assert server.state is State.UNHEALTHY
    await server.clock.advance(14)
    assert await server.ended() == (1, ENGINE_HUNG)
    assert engines.started[0].is_closed


async def test_an_engine_that_cannot_be_ended_is_not_replaced(
    serve: Serve, engines: Engines
) -> None:
    """It still has its memory: the process ends, whatever the threshold."""
    engines.script = [Slow(can_be_killed=False)]
    server = await (await serve(LMI_STALL_TIMEOUT="8", SERVING_RETRY_THRESHOLD="5")).ready()
    engines.started[0].running_requests = 1
    await server.clock.advance(30)
    assert await server.ended() == (1, ENGINE_HUNG)


async def test_a_stall_may_last(serve: Serve, engines: Engines) -> None:
    """LMI_STALL_RESTART_TIMEOUT=0: health is bad, and the engine is waited for."""
    engines.script = [Slow()]
    server = await (await serve(LMI_STALL_TIMEOUT="8", LMI_STALL_RESTART_TIMEOUT="0")).ready()
    engine = engines.started[0]
    engine.running_requests = 1
    await server.clock.advance(1000)
    assert server.state is State.UNHEALTHY
    engine.progress += 1
    await server.clock.advance(2)
    assert (await server.ping())[0] == 200
    engine.running_requests = 0


async def test_an_adapter_that_hangs_the_engine_is_answered(serve: Serve, engines: Engines) -> None:
    """The registration fails, and the engine is replaced."""
    engines.script = [HangingLoad()]
    server = await (
        await serve(
            LMI_STALL_TIMEOUT="8",
            SERVING_RETRY_THRESHOLD="1",
            OPTION_ENABLE_LORA="true",
            LMI_ADAPTER_ROOTS="/",
        )
    ).ready()
    path = f"/adapters?name=one&src={DEMO_MODEL_DIR}/adapters/json"
    asking = asyncio.create_task(server.ask("POST", path))
    await until(lambda: engines.started[0].running_requests == 1)
    await server.clock.advance(24)
    assert (await asyncio.wait_for(asking, REAL_SECONDS)).status >= 424
    await restarted(server, 2)
    assert await server.infer() == 200


@dataclass
class NotFiniteEngine(ScriptedEngine):
    """Proves that it works; the numbers of every later request are not finite."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Answer, or fail."""
        if len(self.jobs) >= WARM_UP_JOBS:
            self.not_finite += 1
            raise EngineFailureError("not finite")
        async for chunk in super().generate(job, direct):
            yield chunk


async def test_a_model_that_is_not_finite_any_more_is_replaced(
    serve: Serve, engines: Engines
) -> None:
    """As an engine that hangs: within the threshold; then the server ends."""
    engines.script = [NotFiniteEngine(), NotFiniteEngine()]
    server = await (await serve(SERVING_RETRY_THRESHOLD="1")).ready()
    assert await server.infer() == 500
    await server.clock.advance(ANSWER_CHECK_SECONDS)
    await restarted(server, 2)
    assert engines.started[0].is_closed
    assert await server.infer() == 500
    await server.clock.advance(ANSWER_CHECK_SECONDS)
    assert await server.ended() == (1, MODEL_CORRUPTED)


async def test_an_idle_engine_that_hangs_is_noticed(serve: Serve, engines: Engines) -> None:
    """LMI_IDLE_PROBE_INTERVAL: without a request of its own a stall has none."""
    engines.script = [first := Slow()]
    server = await (
        await serve(
            LMI_IDLE_PROBE_INTERVAL="40", LMI_STALL_TIMEOUT="8", SERVING_RETRY_THRESHOLD="1"
        )
    ).ready()
    await server.clock.advance(38)
    assert first.running_requests == 0
    await server.clock.advance(4)
    assert (first.running_requests, server.state) == (1, State.HEALTHY)
    await server.clock.advance(10)
    assert server.state is State.UNHEALTHY
    while not first.is_closed:
        await server.clock.advance(0.5)
    await restarted(server, 2)
    assert await server.infer() == 200


async def test_an_engine_with_requests_is_not_probed(serve: Serve, engines: Engines) -> None:
    """Nor one that sleeps; each request starts the time again, and 0 is off."""
    server = await (await serve(LMI_IDLE_PROBE_INTERVAL="40")).ready()
    (engine,) = engines.started
    asked = len(engine.jobs)
    for _ in range(4):
        await server.clock.advance(25)
        engine.progress += 1
    server.set_asleep(is_asleep=True)
    await server.clock.advance(200)
    assert len(engine.jobs) == asked
    server.set_asleep(is_asleep=False)
    await server.clock.advance(60)
    assert len(engine.jobs) > asked


@dataclass
class Refusing(ScriptedEngine):
    """Proves that it works; refuses every later job, and counts no step."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Answer, or fail."""
        if len(self.jobs) >= WARM_UP_JOBS:
            raise EngineFailureError("the device is gone")
        async for chunk in super().generate(job, direct):
            yield chunk


async def test_an_idle_engine_that_refuses_is_replaced(serve: Serve, engines: Engines) -> None:
    """Twice: the first refusal may be that of a pause."""
    engines.script = [Refusing()]
    server = await (await serve(LMI_IDLE_PROBE_INTERVAL="40")).ready()
    await server.clock.advance(60)
    assert await server.ended() == (1, IDLE_ENGINE_REFUSES)
