"""An engine that fails: restarts up to the threshold, then the end that the settings ask for."""

import asyncio
import json

import pytest

from lmi_vllm.engine.deaths import ENGINE_DIED
from lmi_vllm.errors import (
    DeadlineError,
    EngineFailureError,
    EngineStartError,
    LmiError,
    NotReadyError,
    OverloadError,
)
from lmi_vllm.features.scripted.engine import Fail
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import GeneratedToken, GenerationChunk
from lmi_vllm.server.supervisor import (
    RESTART_PAUSE_SECONDS,
)
from tests.server.conftest import PROMPT, Engines, Serve, Slow, restarted, until


async def test_an_engine_that_died_is_replaced(serve: Serve, engines: Engines) -> None:
    """The old one is closed first, health is bad meanwhile, and the next one answers."""
    server = await (await serve(SERVING_RETRY_THRESHOLD="1")).ready()
    first = engines.started[0]
    first.die()
    await server.became(State.PENDING)
    status, entry = await server.ping()
    assert (status, entry["phase"]) == (503, "engine")
    assert (await server.ask("GET", "/health")).status == 200  # a liveness probe waits for it
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
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit code 1, and the reason last; the log names the setting that would restart the engine."""
    server = await (await serve()).ready()
    engines.started[0].die()
    assert await server.ended() == (1, ENGINE_DIED)
    assert engines.started[0].is_closed
    assert "the engine is not restarted (failure 1, retry_threshold 0)" in caplog.text


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


@pytest.mark.parametrize(
    ("error", "variable"),
    [
        (EngineFailureError("it broke"), "SERVING_SERVER_ERROR_HTTP_CODE"),
        (DeadlineError("it took too long"), "SERVING_SERVER_ERROR_HTTP_CODE"),
        (NotReadyError("it leaves"), "SERVING_WLM_ERROR_HTTP_CODE"),
        (OverloadError("it is full"), "SERVING_THROTTLE_ERROR_HTTP_CODE"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, LmiError) else "",
)
@pytest.mark.parametrize("formatter", ["jsonlines", "sse"])
async def test_last_row_of_a_stream_has_the_configured_code(
    serve: Serve, engines: Engines, error: LmiError, variable: str, formatter: str
) -> None:
    """From the variable to the row after the first byte, in each of LMI's framings."""
    environ = {variable: "599", "OPTION_OUTPUT_FORMATTER": formatter}
    server = await (await serve(**environ)).ready()
    first = GenerationChunk(0, (GeneratedToken(5, " a", -0.5),), " a")
    engines.started[0].script = (first, Fail(error))
    answer = await server.ask("POST", "/invocations", {**PROMPT, "stream": True})
    lines = [line.removeprefix("data:") for line in answer.body.decode().split("\n") if line]
    _, row = map(json.loads, lines)
    assert (answer.status, row["code"]) == (200, 599)
    assert error.text in row["error"]
