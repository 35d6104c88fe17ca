"""Requests that end otherwise than by their answer: by who cancels them, or with the engine."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.engine.vllm.workarounds import is_affected
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.messages import OpenAICall
from tests.contract.conftest import LoopThread
from tests.contract.test_bridge import application, http_call, whole

__all__ = ["application"]
pytestmark = pytest.mark.vllm
USER = {"role": "user", "content": "hello"}
LONG: dict[str, Any] = {"model": "lmi", "max_tokens": 1500, "ignore_eos": True}
READ_SECONDS = 0.05
BODIES: dict[str, dict[str, Any]] = {
    "completions": {**LONG, "prompt": "a"},
    "chat/completions": {**LONG, "messages": [USER]},
}


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the engine has its requests, or none any more."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (the engine has no event for it)
            await asyncio.sleep(READ_SECONDS)


@pytest.mark.parametrize("kind", BODIES)
def test_cancelled_answer_is_none(run: LoopThread, vllm_engine: Engine, kind: str) -> None:
    """The shutdown and time limits cancel; the client is there and hears why from them."""

    async def scenario() -> None:
        call = OpenAICall(kind, BODIES[kind], {}, f"cancelled-{kind}")
        task = asyncio.ensure_future(vllm_engine.answer_openai(call))
        await until(lambda: vllm_engine.running_requests > 0)
        await asyncio.sleep(READ_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not vllm_engine.running_requests)

    run(scenario())


STREAMS = {
    "/v1/completions": BODIES["completions"],
    "/v1/chat/completions": BODIES["chat/completions"],
    "/v1/messages": BODIES["chat/completions"],
}


def end_all(engine: Engine) -> None:
    """Say to all requests what vLLM's output loop says when the engine has ended."""
    llm: Any = engine._llm  # type: ignore[attr-defined]
    llm.output_processor.propagate_error(VllmEngineDeadError())


@pytest.mark.parametrize("kind", BODIES)
def test_stream_of_the_lane_ends_with_the_engine(
    run: LoopThread, vllm_engine: Engine, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With our error, as a whole answer; the log says it once for all requests."""

    async def scenario() -> None:
        call = OpenAICall(kind, {**BODIES[kind], "stream": True}, {}, f"ended-{kind}")
        reply = await vllm_engine.answer_openai(call)
        assert reply.stream is not None
        await anext(reply.stream)
        await anext(reply.stream)
        await end_and_read(vllm_engine, reply)

    run(scenario())
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", STREAMS)
def test_stream_of_the_application_ends_with_the_engine(
    run: LoopThread,
    vllm_engine: Engine,
    application: HttpApplication,
    path: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same."""

    async def scenario() -> None:
        reply = await application.call(http_call(path, {**STREAMS[path], "stream": True}))
        assert reply.stream is not None
        await anext(reply.stream)
        await end_and_read(vllm_engine, reply)

    run(scenario())
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


async def end_and_read(engine: Engine, reply: Any) -> None:
    """Read the stream to its end while the engine is said to be dead; it lives, after all."""
    llm: Any = engine._llm  # type: ignore[attr-defined]
    end_all(engine)
    try:
        with pytest.raises(EngineDeadError):
            await whole(reply)
    finally:
        await llm.abort(list(llm.output_processor.request_states), internal=True)


ROUTE_OFF = 404 if is_affected("vllm", "0.32") else 403  # 0.31 has no such route then
REFUSED = {
    "a query": ("GET", "/v1/responses/an-id", "starting_after=abc", b"", 400),
    "a field": ("POST", "/v1/completions", "", b'{"prompt": "a", "max_tokens": "x"}', 400),
    "a value": ("POST", "/v1/completions", "", b'{"prompt": "a", "temperature": -3}', 400),
    "a route that is off": ("POST", "/inference/v1/abort_requests", "", b"{", ROUTE_OFF),
    "no such path": ("POST", "/nowhere", "", b"{}", 404),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_fault_of_a_client_is_no_error_of_the_log(
    run: LoopThread,
    application: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refused: tuple[str, str, str, bytes, int],
) -> None:
    """Also where vLLM would show all errors; VLLM_SERVER_DEV_MODE (`/sleep`, `/pause`) sets it."""
    monkeypatch.setattr(application.app.state.args, "log_error_stack", True)
    method, path, query, body, status = refused
    call = replace(http_call(path, body, method), query_string=query)
    assert run(application.call(call)).status == status
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_plain_vllm_writes_the_engine_s_end_into_streams(application: Any) -> None:
    """`ended_streams.py`: the event that it makes of it, with its own text."""
    handler = application.app.state.openai_serving_chat
    error = VllmEngineDeadError()
    said = getattr(error, "CLIENT_MESSAGE", "See stack trace (above)")  # 0.33 has one for clients
    made = type(handler).create_error_response(error)
    assert said in made.error.message
    with pytest.raises(VllmEngineDeadError):
        handler.create_error_response(error)
    with pytest.raises(VllmEngineDeadError):
        handler.create_streaming_error_response(error)


def test_adapters_have_the_label_of_vllm_s_series(vllm_engine: Engine) -> None:
    """A router joins them, and takes a request for another model for an adapter's."""
    labels = {
        sample.labels["model_name"]
        for metric in REGISTRY.collect()
        if metric.name == "vllm:num_requests_running"
        for sample in metric.samples
    }
    assert vllm_engine.active_adapters.model == "lmi"
    assert labels == {"lmi"}
