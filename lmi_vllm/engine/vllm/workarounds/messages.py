"""Anthropic's messages: what vLLM's handler of them does not read, and failures in their streams.

The `input` of a `tool_use` block that a client sends back is an object. Some clients put the JSON
text there that they collected from a stream, or an empty one, and vLLM refuses it. It is read here.

vLLM makes a stream of messages out of one of chats, and takes an error there for a chunk: the
client gets an `internal_error` with the complaints of pydantic. Here it gets the error itself.

Upstream: not reported that we know of.
Releases: 0.31 and later; errors in streams before 0.33, whose handler reads the chunks of chats as
    objects, and errors among them.
Shows: an assistant turn with `"input": "{}"` is 400. A stream whose grammar comes to a dead end
    says "validation errors for ChatCompletionStreamResponse".
May go: when test_plain_vllm_refuses_the_input_of_a_tool_as_text and
    test_plain_vllm_takes_an_error_for_a_chunk_of_messages fail.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import orjson

from lmi_vllm.engine.vllm.names import CHAT_OBJECTS
from lmi_vllm.messages import HttpCall

_PATHS: Final = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render")
_DATA: Final = "data: "
_ERROR: Final = 'data: {"error":'


def with_objects(call: HttpCall) -> HttpCall:
    """Return the call with each JSON text in place of a tool's `input` as the object that it is."""
    if call.path not in _PATHS or b"tool_use" not in call.body:
        return call
    try:
        payload = orjson.loads(call.body)
        inputs = [block for block in _tool_uses(payload) if isinstance(block.get("input"), str)]
    except (ValueError, LookupError, TypeError):
        return call  # the application says so
    for block in inputs:
        with contextlib.suppress(ValueError):
            read = orjson.loads(block["input"]) if block["input"].strip() else {}
            block["input"] = read if isinstance(read, dict) else block["input"]
    return replace(call, body=orjson.dumps(payload)) if inputs else call


def _tool_uses(payload: Any) -> list[dict[str, Any]]:
    blocks = [
        block
        for message in payload["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
    ]
    return [one for one in blocks if isinstance(one, dict) and one.get("type") == "tool_use"]


def end_with_errors(state: Any) -> None:
    """Let the handler of messages in the state of vLLM's application end its streams so."""
    handler: Any = getattr(state, "anthropic_serving_messages", None)
    convert = getattr(handler, "message_stream_converter", None)
    if convert is None or hasattr(handler, CHAT_OBJECTS):
        return

    async def converted(chunks: Any) -> AsyncIterator[str]:
        failures: list[str] = []
        async with contextlib.aclosing(convert(_until_failure(chunks, failures))) as events:
            async for event in events:
                yield event
        for failure in failures:
            error = orjson.loads(failure.removeprefix(_DATA))["error"]
            shown = {"type": "error", "error": {name: error[name] for name in ("type", "message")}}
            yield f"event: error\ndata: {orjson.dumps(shown).decode()}\n\n"

    handler.message_stream_converter = converted


async def _until_failure(chunks: Any, failures: list[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(_ERROR):
                failures.append(chunk)
                return
            yield chunk
