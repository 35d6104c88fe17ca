"""A start tells where it is, and what it ends of."""

import logging
from pathlib import Path

import pytest

from lmi_vllm.errors import EngineDeadError, EngineFailureError, EngineStartError, StartupError
from lmi_vllm.features.scripted.engine import Fail, ScriptedEngine
from lmi_vllm.inference.start_progress import Phase
from tests.server.conftest import WARM_UP_JOBS, Engines, Serve


async def test_ready_after_a_real_answer(serve: Serve, engines: Engines) -> None:
    """The engine gives a token before health is claimed; stdout says ready and how to try."""
    server = await (await serve()).ready()
    assert await server.ping() == (200, {"status": "Healthy"})
    (engine,) = engines.started
    assert [job.prompt for job in engine.jobs] == ["Hello"] * WARM_UP_JOBS
    assert await server.infer() == 200
    assert "\nTry: curl -s http://" in server.printed()
    server.stop.set()
    assert await server.ended() == (0, "")
    assert engine.is_closed


async def test_ping_shows_the_phase_and_its_seconds(serve: Serve, engines: Engines) -> None:
    """While the engine starts: 503 with the phase and the seconds; requests are refused."""
    engines.gate.clear()
    server = await serve()
    await server.reached(Phase.ENGINE)
    await server.clock.advance(7)
    status, entry = await server.ping()
    assert (status, entry["status"], entry["phase"]) == (503, "PENDING", "engine")
    assert entry["elapsed_seconds"] == 7.0
    assert await server.infer() == 503
    engines.gate.set()
    await server.ready()
    assert (await server.ping())[0] == 200


async def test_a_long_start_is_in_the_log(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """A line every ten seconds, and which limits to raise once half of the time has passed."""
    caplog.set_level(logging.INFO)
    engines.gate.clear()
    server = await serve(OPTION_MODEL_LOADING_TIMEOUT="60")
    await server.reached(Phase.ENGINE)
    await server.clock.advance(25)
    assert sum(line.startswith("starting: ") for line in caplog.messages) == 2
    assert "half of model_loading_timeout" not in caplog.text
    await server.clock.advance(15)
    assert "half of model_loading_timeout (60 s) has passed" in caplog.text


async def test_a_start_that_takes_too_long_ends_the_server(serve: Serve, engines: Engines) -> None:
    """The reason names the option and the phase, and what was started is ended."""
    engines.gate.clear()
    server = await serve(OPTION_MODEL_LOADING_TIMEOUT="60")
    await server.reached(Phase.ENGINE)
    await server.clock.advance(61)
    code, reason = await server.ended()
    assert code == 1
    assert "model_loading_timeout (60 s), in phase engine" in reason
    assert engines.is_abandoned


def dead() -> ScriptedEngine:
    """Return an engine whose process its first request ends."""
    engine = ScriptedEngine(script=[Fail(EngineDeadError())])
    engine.die()
    return engine


FAILURES = {
    "refused": (EngineStartError("no such device"), "no such device"),
    "unexpected": (ValueError("what"), "start-up failed: ValueError: what"),
    "cannot answer": (
        ScriptedEngine(script=[Fail(EngineFailureError("bad kernel"))]),
        "the engine started but cannot answer: bad kernel",
    ),
    "died": (dead(), "the engine started but cannot answer: the engine process died"),
}


@pytest.mark.parametrize(("step", "reason"), FAILURES.values(), ids=FAILURES)
async def test_a_failed_start_ends_the_server(
    serve: Serve, engines: Engines, step: ScriptedEngine | Exception, reason: str
) -> None:
    """Exit code 1 and the reason in one line; retry_threshold is for engines that have served."""
    engines.script = [step]
    server = await serve(SERVING_RETRY_THRESHOLD="3")
    assert await server.ended() == (1, reason)
    assert "Ready on" not in server.printed()
    assert all(engine.is_closed for engine in engines.started)


async def test_a_model_that_is_not_there_is_refused(serve: Serve, tmp_path: Path) -> None:
    """A model that is no directory ends the start before any engine."""
    server = await serve(model=str(tmp_path / "missing"))
    code, reason = await server.ended()
    assert code == 1
    assert "missing" in reason


async def test_an_address_that_is_taken_is_refused(serve: Serve) -> None:
    """The server says so before it starts anything."""
    first = await (await serve()).ready()  # what it prints is no longer read by the second
    port = first.url.rpartition(":")[2]
    second = await serve(SERVING_INFERENCE_ADDRESS=f"http://127.0.0.1:{port}", port=None)
    with pytest.raises(StartupError, match=f"cannot listen on http://127.0.0.1:{port}"):
        await second.ended()
    assert await first.infer() == 200


async def test_batch_size_without_rolling_batch_streams(
    serve: Serve, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    """LMI does not start with these and streaming; here each request decides, and it is said."""
    options = {"OPTION_ROLLING_BATCH": "disable", "OPTION_BATCH_SIZE": "4"}
    server = await (await serve(**options, OPTION_ENABLE_STREAMING="true")).ready()
    for name in ("OPTION_BATCH_SIZE", "OPTION_ENABLE_STREAMING"):
        assert sum(name in line and "has no effect" in line for line in caplog.messages) == 1
    assert await server.infer() == 200
    assert (await server.ask("POST", "/invocations", {"inputs": "x", "stream": True})).status == 200
    (engine,) = engines.started
    assert [job.is_streaming for job in engine.jobs[-2:]] == [False, True]
