"""vLLM's OpenAI answers as LMI routes give them (http-api.md 7)."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from lmi_vllm.errors import (
    EngineFailureError,
    LmiError,
    NotReadyError,
    RequestError,
    RouteFamily,
    openai_error,
    status_of,
    tgi_error,
)
from lmi_vllm.inference.response.formatters import FRAMINGS, Framing, lmi_error
from lmi_vllm.inference.response.streams import close_iterator
from lmi_vllm.messages import OpenAIReply, Reply

SSE_DONE: Final = b"data: [DONE]\n\n"
_SSE_DATA: Final = b"data: "
_SSE_ERROR: Final = b'data: {"error":'  # how vLLM's streams fail; its chunks begin otherwise


class StreamDialect(Protocol):
    """How a route gives vLLM's streams on, and in whose words one that we cut ends."""

    def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return vLLM's events as the route sends them."""
        ...

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        ...


@dataclass(frozen=True, slots=True)
class OpenAIDialect:
    """How a route gives vLLM's streams on: in which framing, and in whose words they fail."""

    family: RouteFamily
    framing: Framing

    @property
    def is_vllm_s(self) -> bool:
        """Whether its bytes are vLLM's own, errors and end marker included."""
        return self.framing is FRAMINGS["sse"] and self.family is not RouteFamily.TGI

    def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return vLLM's events as this route sends them; only errors are ever parsed."""
        return events if self.is_vllm_s else self._converted(events)

    def event(self, event: bytes) -> bytes:
        """Return one of vLLM's events, neither an error nor its end marker, in this framing."""
        return event if self.framing is FRAMINGS["sse"] else event[len(_SSE_DATA) : -1]

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        if self.is_vllm_s:
            status = status_of(error, RouteFamily.OPENAI)
            return self.framing.frame(openai_error(error, error.text, status)) + SSE_DONE
        return self.framing.frame(self._row(error))

    def _row(self, error: LmiError) -> dict[str, Any]:
        status = status_of(error, self.family)
        if self.family is RouteFamily.TGI:
            return dict(tgi_error(error.text, status))
        return lmi_error(error.text, status)

    async def _converted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        is_sse = self.framing is FRAMINGS["sse"]
        try:
            async for event in events:
                if event.startswith(_SSE_ERROR):
                    yield self.error(error_of(event[len(_SSE_DATA) :]))
                    return
                if is_sse or event != SSE_DONE:
                    yield self.event(event)
        finally:
            await close_iterator(events)


V1_DIALECT: Final = OpenAIDialect(RouteFamily.OPENAI, FRAMINGS["sse"])


def lmi_reply(answer: OpenAIReply, content_type: str = "application/json") -> Reply:
    """Return vLLM's answer with a final newline, or its stream as `content_type`.

    Raises:
        LmiError: vLLM's error object, as the error of ours that has its meaning and text.
    """
    if answer.stream is not None:
        return Reply(200, content_type, stream=answer.stream)
    if answer.status >= 400:  # noqa: PLR2004 (an error status)
        raise error_of(answer.body)
    return Reply(answer.status, answer.content_type, answer.body + b"\n")


def error_of(body: bytes) -> LmiError:
    """Return vLLM's error object as the error of ours that has its meaning and text."""
    error = orjson.loads(body)["error"]
    text, status = str(error["message"]), int(error["code"])
    if status == 503:  # noqa: PLR2004 (vLLM's own queue limit)
        return NotReadyError(text, retry_after_seconds=1)
    if status >= 500:  # noqa: PLR2004 (the engine's fault, not the client's)
        return EngineFailureError(text)
    return RequestError(text)
