"""vLLM's OpenAI answers as LMI routes give them (http-api.md 7)."""

from collections.abc import AsyncIterator
from typing import Final

import orjson

from lmi_vllm.errors import EngineFailureError, LmiError, NotReadyError, RequestError
from lmi_vllm.inference.formatters import FRAMINGS, Framing
from lmi_vllm.inference.streams import close_iterator
from lmi_vllm.messages import OpenAIReply, Reply

SSE_DONE: Final = b"data: [DONE]\n\n"
_SSE_DATA: Final = b"data: "


def lmi_reply(answer: OpenAIReply, framing: Framing) -> Reply:
    """Return vLLM's answer with a final newline, or its stream in `framing`.

    Raises:
        LmiError: vLLM's error object, as the error of ours that has its meaning and text.
    """
    if answer.stream is not None:
        if framing is FRAMINGS["sse"]:
            return Reply(200, framing.content_type, stream=answer.stream)
        return Reply(200, framing.content_type, stream=_without_sse(answer.stream))
    if answer.status >= 400:  # noqa: PLR2004 (an error status)
        raise error_of(answer)
    return Reply(answer.status, answer.content_type, answer.body + b"\n")


async def _without_sse(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Slice vLLM's SSE framing off; its JSON is never parsed. The end marker is dropped."""
    try:
        async for event in events:
            if event != SSE_DONE:
                yield event[len(_SSE_DATA) : -1]
    finally:
        await close_iterator(events)


def error_of(answer: OpenAIReply) -> LmiError:
    """Return vLLM's error object as the error of ours that has its meaning and text."""
    text = str(orjson.loads(answer.body)["error"]["message"])
    if answer.status == 503:  # noqa: PLR2004 (vLLM's own queue limit)
        return NotReadyError(text, retry_after_seconds=1)
    if answer.status >= 500:  # noqa: PLR2004 (the engine's fault, not the client's)
        return EngineFailureError(text)
    return RequestError(text)
