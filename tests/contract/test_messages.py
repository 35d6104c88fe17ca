"""Anthropic's messages on vLLM's application: what clients send back, failures, and the log."""

import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.engine.vllm.workarounds.messages import with_objects
from tests.contract.conftest import LoopThread
from tests.contract.releases import before, since
from tests.contract.test_bridge import application, http_call, whole

__all__ = ["application"]
pytestmark = pytest.mark.vllm
USER = {"role": "user", "content": "hello"}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def conversation(given: object) -> dict[str, Any]:
    """Return a request whose history has a call with this input."""
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": given}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "sea"}
    turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"model": "lmi", "max_tokens": 2, "messages": turns}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("given", ['{"place": "sea"}', "", " "])
def test_input_of_a_tool_may_be_its_json(
    run: LoopThread, application: HttpApplication, path: str, given: str
) -> None:
    """As clients have it that collected it from a stream."""
    assert run(application.call(http_call(path, conversation(given)))).status == 200


@pytest.mark.parametrize("given", ["[1]", "sea", 5])
def test_input_that_is_no_object_is_refused(
    run: LoopThread, application: HttpApplication, given: object
) -> None:
    """In vLLM's words."""
    assert run(application.call(http_call(PATHS[0], conversation(given)))).status == 400


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{tool_use", b'{"messages": ["tool_use"]}', b'{"messages": "tool_use"}']
)
def test_other_bodies_are_handed_on(body: bytes) -> None:
    """The application says what is wrong with them."""
    call = http_call(PATHS[0], body)
    assert with_objects(call) is call


def test_plain_vllm_refuses_the_input_of_a_tool_as_text() -> None:
    """`messages.py`: the form in which its own stream gives it."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # noqa: PLC0415

    with pytest.raises(ValueError, match="input"):
        AnthropicMessagesRequest(**conversation("{}"))


ERROR = {"message": "a dead end", "type": "BadRequestError", "param": None, "code": 400}


FIRST = {
    "id": "1",
    "created": 1,
    "model": "lmi",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
    "usage": None,
}


async def chunks() -> AsyncIterator[str]:
    """Yield a stream of chats that fails after its first chunk."""
    yield f"data: {json.dumps(FIRST)}\n\n"
    yield f"data: {json.dumps({'error': ERROR})}\n\n"
    yield "data: [DONE]\n\n"


async def objects() -> AsyncIterator[Any]:
    """Yield the same as 0.33 does."""
    yield ChatCompletionStreamResponse(**FIRST)
    yield ErrorResponse(error=ErrorInfo(**ERROR))


def failed(run: LoopThread, convert: Any, stream: AsyncIterator[Any]) -> list[str]:
    """Return the events of messages that a converter makes of a stream of chats."""

    async def collected() -> list[str]:
        return [event async for event in convert(stream)]

    return run(collected())


@before("0.33", "its handler reads text")
def test_failure_in_a_stream_is_an_event_of_it(
    run: LoopThread, application: HttpApplication
) -> None:
    """With the error's own type and text, and nothing after it."""
    handler: Any = application.app.state.anthropic_serving_messages  # type: ignore[attr-defined]
    events = failed(run, handler.message_stream_converter, chunks())
    assert events[0].startswith("event: message_start")
    assert events[-1] == (
        'event: error\ndata: {"type":"error","error":{"type":"BadRequestError",'
        '"message":"a dead end"}}\n\n'
    )


@since("0.33", "its handler reads objects")
def test_failure_among_objects_is_an_event_of_the_stream(
    run: LoopThread, application: HttpApplication
) -> None:
    """The type is Anthropic's word."""
    handler: Any = application.app.state.anthropic_serving_messages  # type: ignore[attr-defined]
    events = failed(run, handler.message_stream_converter, objects())
    assert events[0].startswith("event: message_start")
    assert events[-1] == (
        'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error",'
        '"message":"a dead end"}}\n\n'
    )


@before("0.33", "where it reads objects, errors are among them")
def test_plain_vllm_takes_an_error_for_a_chunk_of_messages(
    run: LoopThread, application: HttpApplication
) -> None:
    """`messages.py`: its class has what ours calls."""
    handler: Any = application.app.state.anthropic_serving_messages  # type: ignore[attr-defined]
    plain = partial(type(handler).message_stream_converter, handler)
    assert "validation error" in failed(run, plain, chunks())[-1]


FAULTS = {
    "messages": ("/v1/messages", {"model": "lmi", "max_tokens": 2, "messages": [USER]}),
    "a stream of them": (
        "/v1/messages",
        {"model": "lmi", "max_tokens": 2, "messages": [USER], "stream": True},
    ),
    "tokens": ("/v1/messages/count_tokens", {"model": "no such", "messages": [USER]}),
    "chat": ("/v1/chat/completions", {"messages": [USER], "stream": True}),
    "response": ("/v1/responses", {"input": "hello", "model": "no such"}),
    "batch": ("/v1/chat/completions/batch", {"messages": [[USER]], "model": "no such"}),
}


@pytest.mark.parametrize(("path", "body"), FAULTS.values(), ids=FAULTS)
def test_fault_of_a_client_is_no_error_in_the_log(
    run: LoopThread,
    application: HttpApplication,
    caplog: pytest.LogCaptureFixture,
    path: str,
    body: dict[str, Any],
) -> None:
    """The answer says it; nonsense writes no tracebacks."""
    with caplog.at_level(logging.INFO):
        reply = run(application.call(http_call(path, {**body, "temperature": -3})))
        run(whole(reply))
    assert 400 <= reply.status < 500
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_failure_of_the_server_stays_in_the_log(
    application: HttpApplication, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same handlers."""
    assert application
    handler = logging.getLogger("vllm.entrypoints.anthropic.api_router")
    error = RuntimeError("ours")
    handler.error("Error in create_messages: %s", error, exc_info=error)
    assert "ours" in caplog.text


def test_plain_vllm_logs_the_fault_of_a_client_with_its_traceback(
    run: LoopThread, vllm_engine: Engine, application: HttpApplication
) -> None:
    """`client_faults.py`: its filters see the line that they leave out."""
    seen: list[logging.LogRecord] = []
    handler = logging.getLogger("vllm.entrypoints.anthropic.api_router")

    class Seeing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            seen.append(record)
            return True

    watching = Seeing()
    handler.filters.insert(0, watching)
    body = {"model": "lmi", "max_tokens": 2, "messages": [USER], "temperature": -3}
    assert run(application.call(http_call("/v1/messages", body))).status == 400
    handler.removeFilter(watching)
    assert [(record.levelno, bool(record.exc_info)) for record in seen] == [(logging.ERROR, True)]
