"""Streams of an engine that has ended: vLLM writes its own text into them, and a traceback each.

Whole answers are 500 then, with this server's text. The handlers of chats, completions and sounds
make an event of the exception instead, and end the stream as if it were complete. Those that make
another form out of a stream of chats (messages, Cohere's chat) take it for a failure of their own.
Here the exception goes through, so that this server ends the stream in the form of its route. From
0.33 on a chunk of chats is an object, and so is the error.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: after a SIGKILL of the engine a stream ends with "EngineCore encountered an issue. See stack
    trace (above) for the root cause.", or "The server had an error while processing your request."
May go: when test_plain_vllm_writes_the_engine_s_end_into_streams fails.
"""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from lmi_vllm.engine.vllm.names import VllmEngineDeadError


def end_with_the_engine(state: Any) -> None:
    """Let the engine's end go through all handlers in the state of vLLM's application."""
    for handler in vars(state)["_state"].values():
        if hasattr(handler, "create_streaming_error_response"):  # which calls the other one
            handler.create_error_response = _raising(handler.create_error_response)
        if (convert := getattr(handler, "message_stream_converter", None)) is not None:
            handler.message_stream_converter = _passing_on(convert)
        if (convert := getattr(handler, "_chat_completion_stream_to_v2", None)) is not None:
            handler._chat_completion_stream_to_v2 = _passing_on(convert)


def _raising(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(message: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(message, VllmEngineDeadError):
            raise message
        return make(message, *rest, **named)

    return made


def _passing_on(convert: Callable[..., Any]) -> Callable[..., AsyncIterator[str]]:
    async def converted(chunks: Any, *rest: Any, **named: Any) -> AsyncIterator[str]:
        ends: list[VllmEngineDeadError] = []
        made = convert(_until_the_end(chunks, ends), *rest, **named)
        async with contextlib.aclosing(made) as events:
            async for event in events:
                if ends:  # it takes the end of the chats for that of the message
                    break
                yield event
        if ends:
            raise ends[0]

    return converted


async def _until_the_end(chunks: Any, ends: list[VllmEngineDeadError]) -> AsyncIterator[Any]:
    async with contextlib.aclosing(chunks):
        try:
            async for chunk in chunks:
                yield chunk
        except VllmEngineDeadError as error:
            ends.append(error)
