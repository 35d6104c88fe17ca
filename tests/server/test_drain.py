"""Graceful shutdown: running work ends within its deadline, new work is refused."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from lmi_vllm.clock import ENGINE_CLOSE_SECONDS
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.server.end_budget import WHOLE_END_SECONDS
from tests.server.conftest import (
    PROMPT,
    WARM_UP_JOBS,
    Answer,
    Engines,
    Serve,
    Serving,
    Slow,
    settle,
    until,
)


async def draining(serve: Serve, engines: Engines) -> tuple[Serving, "asyncio.Task[Answer]", Slow]:
    """Return a server that drains, and the request that it waits for."""
    engines.script = [engine := Slow()]
    server = await (await serve(SERVING_SHUTDOWN_TIMEOUT="30")).ready()
    request = asyncio.create_task(server.ask("POST", "/invocations", PROMPT))
    await until(lambda: server.in_flight == 1)
    server.stop.set()
    await server.became(State.DRAINING)
    return server, request, engine


async def test_an_idle_server_ends_at_once(serve: Serve, engines: Engines) -> None:
    """Nothing is waited for; the engine is closed."""
    server = await (await serve()).ready()
    server.stop.set()
    assert await server.ended() == (0, "")
    assert engines.started[0].is_closed


async def test_new_work_is_refused_while_running_work_ends(serve: Serve, engines: Engines) -> None:
    """`/ping` is 503 with the state; refusals say when to come back; what runs is answered."""
    server, request, engine = await draining(serve, engines)
    assert await server.ping() == (503, {"status": "DRAINING"})
    refused = await server.ask("POST", "/invocations", PROMPT)
    assert (refused.status, refused.headers["Retry-After"]) == (503, "30")
    assert not server.is_over
    engine.rest.set()
    assert (await request).status == 200
    assert await server.ended() == (0, "")


async def test_deadline_ends_unfinished_requests(serve: Serve, engines: Engines) -> None:
    """SERVING_SHUTDOWN_TIMEOUT: what is still running then gets an error of the shutdown."""
    server, request, _ = await draining(serve, engines)
    await server.clock.advance(29)
    assert not request.done()
    await server.clock.advance(2)
    answer = await request
    assert answer.status == 503
    assert b"the server shut down before the answer was complete" in answer.body
    assert await server.ended() == (0, "")


async def test_a_second_signal_hurries(serve: Serve, engines: Engines) -> None:
    """It ends what runs at once."""
    server, request, _ = await draining(serve, engines)
    await settle()
    server.stop.set()
    assert (await request).status == 503
    assert await server.ended() == (0, "")


async def test_a_stop_during_the_start_ends_it(serve: Serve, engines: Engines) -> None:
    """A start is not waited for."""
    engines.gate.clear()
    server = await serve()
    server.stop.set()
    assert await server.ended() == (0, "")
    assert "Ready on" not in server.printed()


async def test_a_stop_during_a_restart_ends_it(serve: Serve, engines: Engines) -> None:
    """The engine is not brought back for a server that ends."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="5")).ready()
    engines.started[0].die()
    await server.became(State.PENDING)
    server.stop.set()
    assert await server.ended() == (0, "")
    assert len(engines.started) == 1


@dataclass
class ToldLate(Slow):
    """An engine whose requests fail before it is known why it has ended, as vLLM's."""

    told: asyncio.Event = field(default_factory=asyncio.Event)

    async def _sleep(self, seconds: float) -> None:
        if len(self.jobs) > WARM_UP_JOBS:
            await self._dead.wait()
            await self.check_health()

    async def wait_until_dead(self) -> str:
        """Return the reason once it is known."""
        await self._dead.wait()
        await self.told.wait()
        return "killed by SIGKILL"


async def test_the_log_says_why_an_engine_died_in_a_drain(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests have failed, so that the drain is over; the reason comes a moment later."""
    engines.script = [engine := ToldLate()]
    server = await (await serve()).ready()
    request = asyncio.create_task(server.ask("POST", "/invocations", PROMPT))
    await until(lambda: server.in_flight == 1)
    server.stop.set()
    await server.became(State.DRAINING)
    engine.die()
    assert (await request).status == 500
    await settle()
    assert "killed by SIGKILL" not in caplog.text
    engine.told.set()
    assert await server.ended() == (0, "")
    assert "killed by SIGKILL" in caplog.text


class Hanging(ScriptedEngine):
    """An engine whose end never comes."""

    async def close(self) -> None:
        """Hang."""
        await asyncio.Event().wait()


async def test_an_engine_that_does_not_end_is_left(serve: Serve, engines: Engines) -> None:
    """Its end has a limit, too: the process ends then, and its children with it."""
    engines.script = [Hanging()]
    server = await (await serve()).ready()
    server.stop.set()
    await server.became(State.DRAINING)
    await asyncio.sleep(0.05)
    assert not server.is_over
    await server.clock.advance(ENGINE_CLOSE_SECONDS)
    assert await server.ended() == (0, "")


async def test_a_pause_before_the_drain_serves_on(serve: Serve, engines: Engines) -> None:
    """LMI_SHUTDOWN_DELAY: readiness is 503 at once; what balancers still send is answered."""
    server = await (await serve(LMI_SHUTDOWN_DELAY="5", SERVING_SHUTDOWN_TIMEOUT="12")).ready()
    server.stop.set()
    await settle()
    assert await server.ping() == (503, {"status": "Healthy", "shutting_down": True})
    assert (await server.ask("GET", "/ready")).status == 503
    assert (await server.ask("GET", "/v2/health/ready")).status == 503
    assert (await server.ask("GET", "/health")).status == 200  # else the pod would be killed
    assert await server.infer() == 200
    assert server.state is State.HEALTHY
    await server.clock.advance(5)
    assert await server.ended() == (0, "")


async def test_a_second_signal_ends_the_pause(serve: Serve, engines: Engines) -> None:
    """As it ends the drain."""
    server = await (await serve(LMI_SHUTDOWN_DELAY="5")).ready()
    server.stop.set()
    await settle()
    server.stop.set()
    assert await server.ended() == (0, "")


async def test_the_pause_is_part_of_the_time_to_end(serve: Serve, engines: Engines) -> None:
    """Requests have SERVING_SHUTDOWN_TIMEOUT from SIGTERM on, with a pause and without one."""
    engines.script = [Slow()]
    server = await (await serve(LMI_SHUTDOWN_DELAY="5", SERVING_SHUTDOWN_TIMEOUT="12")).ready()
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    server.stop.set()
    await server.clock.advance(11)
    assert not request.done()
    await server.clock.advance(1.5)
    assert await request == 503
    assert await server.ended() == (0, "")


async def test_what_hangs_takes_no_end_past_its_budget(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that stalls and an engine that hangs, after a drain that took all of its time."""
    engines.script = [Stuck()]
    server = await (await serve()).ready()
    server.on_drained(asyncio.Event().wait)
    request = asyncio.create_task(server.infer())
    await until(lambda: server.in_flight == 1)
    server.stop.set()
    await server.clock.advance(WHOLE_END_SECONDS)
    assert await request == 503
    assert await server.ended() == (0, "")
    assert "took longer than the end may" in caplog.text


class Stuck(Slow):
    """Answers nothing, and does not end."""

    async def close(self) -> None:
        """Hang."""
        await asyncio.Event().wait()


async def test_the_last_line_says_what_was_answered_and_what_was_cut(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Of inference; one that is in flight at the deadline is cut."""
    caplog.set_level(logging.INFO)
    server, request, _ = await draining(serve, engines)
    assert (await server.ask("POST", "/invocations", PROMPT)).status == 503
    await server.clock.advance(30)
    await request
    await server.ended()
    said = [text for text in caplog.messages if text.startswith("ended: ")]
    assert said == ["ended: 2 refused or failed, 1 of those in flight cut off"]
