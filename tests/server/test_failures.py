"""An engine that fails: restarts up to the threshold, then the end that the settings ask for."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.base import DirectChunks
from lmi_vllm.engine.scripted import ScriptedEngine
from lmi_vllm.errors import EngineFailureError, EngineStartError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import AdapterRef, GenerationChunk, GenerationJob
from lmi_vllm.server.liveness import ANSWER_CHECK_SECONDS
from lmi_vllm.server.supervisor import (
    ENGINE_DIED,
    ENGINE_HUNG,
    MODEL_CORRUPTED,
    RESTART_PAUSE_SECONDS,
)
from tests.server.conftest import REAL_SECONDS, Engines, Serve, Serving, Slow, until


async def restarted(server: Serving, number: int) -> None:
    """Return when engine `number`, counted from 1, serves after a pause of the test's clock."""
    await server.became(State.PENDING)
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await until(lambda: len(server.engines.started) == number)
    await server.became(State.HEALTHY)


async def test_an_engine_that_died_is_replaced(serve: Serve, engines: Engines) -> None:
    """The old one is closed first, health is bad meanwhile, and the next one answers."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="1")).ready()
    first = engines.started[0]
    first.die()
    await server.became(State.PENDING)
    status, entry = await server.ping()
    assert (status, entry["phase"]) == (503, "engine")
    assert first.is_closed
    assert len(engines.started) == 1  # the memory of the old one is given a moment
    await restarted(server, 2)
    assert await server.infer() == 200
    assert engines.started[1].jobs


async def test_more_failures_than_the_threshold_end_the_server(
    serve: Serve, engines: Engines
) -> None:
    """Each failure counts, whether the engine died or did not come up again."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="2")).ready()
    engines.started[0].die()
    await restarted(server, 2)
    engines.script = [EngineStartError("no memory is left")]
    engines.started[1].die()
    await server.became(State.PENDING)
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    assert await server.ended() == (1, "no memory is left")


async def test_a_restart_that_fails_is_tried_again(serve: Serve, engines: Engines) -> None:
    """Within the threshold a start that failed is followed by another."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="2")).ready()
    engines.script = [EngineStartError("the port is still taken")]
    engines.started[0].die()
    await server.became(State.PENDING)
    await server.clock.advance(RESTART_PAUSE_SECONDS)
    await until(lambda: not engines.script)
    await restarted(server, 2)


async def test_without_a_threshold_the_first_death_ends_the_server(
    serve: Serve, engines: Engines
) -> None:
    """Exit code 1, and the reason last."""
    server = await (await serve()).ready()
    engines.started[0].die()
    assert await server.ended() == (1, ENGINE_DIED)
    assert engines.started[0].is_closed


async def test_requests_in_flight_are_waited_for_after_a_failure(
    serve: Serve, engines: Engines
) -> None:
    """They get their errors; new ones are refused as long as the port is open."""
    engine = Slow()
    engines.script = [engine]
    server = await (await serve()).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    engine.die()
    assert await request == 500
    assert await server.ended() == (1, ENGINE_DIED)


async def test_fail_fast_ends_at_once(serve: Serve, engines: Engines) -> None:
    """Exit code 137, as after a kill, without waiting for requests."""
    engine = Slow()
    engines.script = [engine]
    server = await (await serve(SERVING_FAIL_FAST="true")).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    engine.die()
    assert await server.ended() == (137, ENGINE_DIED)
    await request


async def test_health_can_hide_a_failure(serve: Serve, engines: Engines) -> None:
    """SERVING_HEALTH_CHECK_OVERRIDE: the process stays, `/ping` is 200, requests are refused."""
    server = await (await serve(SERVING_HEALTH_CHECK_OVERRIDE="true")).ready()
    engines.started[0].die()
    await server.became(State.FAILED)
    assert await server.ping() == (200, {"status": "FAILED"})
    assert await server.infer() == 503
    server.stop.set()
    assert await server.ended() == (0, "")


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
    """It may keep requests for when it is woken; then the time counts anew."""
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
class Spoilt(ScriptedEngine):
    """Answers once; the numbers of every later request are not finite."""

    async def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Answer, or fail."""
        if self.jobs:
            self.not_finite += 1
            raise EngineFailureError("not finite")
        async for chunk in super().generate(job, direct):
            yield chunk


async def test_a_model_that_is_not_finite_any_more_is_replaced(
    serve: Serve, engines: Engines
) -> None:
    """As an engine that hangs: within the threshold; then the server ends."""
    engines.script = [Spoilt(), Spoilt()]
    server = await (await serve(SERVING_RETRY_THRESHOLD="1")).ready()
    assert await server.infer() == 500
    await server.clock.advance(ANSWER_CHECK_SECONDS)
    await restarted(server, 2)
    assert engines.started[0].is_closed
    assert await server.infer() == 500
    await server.clock.advance(ANSWER_CHECK_SECONDS)
    assert await server.ended() == (1, MODEL_CORRUPTED)
