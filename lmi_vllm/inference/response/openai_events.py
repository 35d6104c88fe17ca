"""vLLM's OpenAI answers in the form of each route: its errors, and the ends of its streams."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    Dialect,
    EngineFailureError,
    Fault,
    LmiError,
    NotReadyError,
    RequestError,
    StatusTable,
    anthropic_error,
    openai_error,
    tgi_error,
)
from lmi_vllm.inference.response.formatters import frame, lmi_error
from lmi_vllm.inference.response.streams import close_iterator
from lmi_vllm.messages import FRAMINGS, Framing, HttpRoute, OpenAIReply, Reply

SSE_DONE: Final = b"data: [DONE]\n\n"
_DATA: Final = b"data: "
_BLANK_LINE: Final = len(b"\n\n")
RESPONSES: Final = "responses"  # the kind of call
RESPONSES_PATH: Final = "/v1/responses"
# The Responses API's codes for faults that the request caused, and for others.
_CLIENT_CODE: Final = "invalid_prompt"
_CODE: Final = "server_error"
_COMPLETED: Final = b"event: response.completed\n"
SSE_ERROR: Final = b'data: {"error":'  # how vLLM's streams fail; its chunks begin otherwise


class EventStream(Protocol):
    """How a route forwards vLLM's events, and how a stream ends that the server cuts."""

    def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return vLLM's events as the route sends them."""
        ...

    def event(self, event: bytes) -> bytes:
        """Return an event that is written directly, in the form of the route."""
        ...

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        ...


class UnchangedEvents:
    """Events that are forwarded unchanged."""

    def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return them."""
        return events

    def event(self, event: bytes) -> bytes:
        """Return it."""
        return event


@dataclass(frozen=True, slots=True)
class FramedEvents:
    """vLLM's events in the framing of a route; errors in its dialect."""

    dialect: Dialect
    framing: Framing
    statuses: StatusTable = DEFAULT_STATUSES

    @property
    def is_vllm_s(self) -> bool:
        """Whether its bytes are vLLM's own, with errors and end marker."""
        return self.framing is FRAMINGS["sse"] and self.dialect is not Dialect.TGI

    def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return vLLM's events in the form of this route; only errors are ever parsed."""
        return events if self.is_vllm_s else self._converted(events)

    def event(self, event: bytes) -> bytes:
        """Return one of vLLM's events, neither an error nor the end marker, in this framing."""
        if self.framing is FRAMINGS["sse"]:
            return event
        return self.framing.before + event[len(_DATA) : -_BLANK_LINE] + self.framing.after

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        if self.is_vllm_s:
            status = self.statuses.of(error, Dialect.OPENAI)
            return frame(self.framing, openai_error(error, error.text, status)) + SSE_DONE
        return frame(self.framing, self._row(error))

    def _row(self, error: LmiError) -> dict[str, Any]:
        status = self.statuses.of(error, self.dialect)
        if self.dialect is Dialect.TGI:
            return dict(tgi_error(error.text, status))
        return lmi_error(error.text, status)

    async def _converted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        is_sse = self.framing is FRAMINGS["sse"]
        try:
            async for event in events:
                if event.startswith(SSE_ERROR):
                    yield self.error(error_of(event[len(_DATA) :]))
                    return
                if is_sse or event != SSE_DONE:
                    yield self.event(event)
        finally:
            await close_iterator(events)


V1_EVENTS: Final = FramedEvents(Dialect.OPENAI, FRAMINGS["sse"])


class ResponsesEvents:
    """A stream of the Responses API; its end is the API's own.

    OpenAI's API reference, "Streaming events": every event has a name, a type and a sequence
    number. A response that fails ends with `error` and `response.failed`, one that is cut by
    `max_output_tokens` with `response.incomplete`. There is no `[DONE]`. vLLM ends each with
    `response.completed` (DECISIONS.md 137).
    """

    def __init__(self) -> None:
        self._first = b""
        self._last = b""

    async def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events, unchanged but for the last one of an incomplete response."""
        try:
            async for event in events:
                yield self.event(event)
        finally:
            await close_iterator(events)

    def event(self, event: bytes) -> bytes:
        """Return the event; its sequence number is kept for an error event."""
        if event.startswith(_COMPLETED):
            event = _ended(event)
        self._first = self._first or event
        self._last = event
        return event

    def error(self, error: LmiError) -> bytes:
        """Return `error`, and `response.failed` if the client has seen a response."""
        number = int(_data(self._last).get("sequence_number", -1)) + 1
        code = _CLIENT_CODE if error.fault is Fault.CLIENT else _CODE
        last_event = _framed(
            {
                "type": "error",
                "code": code,
                "message": error.text,
                "param": None,
                "sequence_number": number,
            }
        )
        response = _data(self._first).get("response")
        if not isinstance(response, dict):
            return last_event
        failed = {
            **response,
            "status": "failed",
            "error": {"code": code, "message": error.text},
        }
        return last_event + _framed(
            {"type": "response.failed", "response": failed, "sequence_number": number + 1}
        )


class AnthropicEvents(UnchangedEvents):
    """A stream of Anthropic's messages; a failure is an event, and the last one."""

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        status = DEFAULT_STATUSES.of(error, Dialect.ANTHROPIC)
        return _framed(anthropic_error(error, error.text, status))


class CohereEvents(UnchangedEvents):
    """A stream of Cohere's chat; a failure is the end of its message, as in vLLM."""

    def error(self, error: LmiError) -> bytes:
        """Return the end of a stream that failed after its first byte."""
        delta = {"error": error.text, "finish_reason": "ERROR"}
        end = orjson.dumps({"type": "message-end", "delta": delta})
        return b"data: %b\n\n%b" % (end, SSE_DONE)


class RawByteStream(UnchangedEvents):
    """A byte stream without events: an error cuts it, since a clean end would look complete."""

    def error(self, error: LmiError) -> bytes:
        """Raise the error, which cuts the connection."""
        raise error


def event_stream(route: HttpRoute, content_type: str) -> EventStream:
    """Return how a stream of the engine's own application is forwarded."""
    if not content_type.startswith("text/event-stream"):
        return RawByteStream()
    if route.dialect is Dialect.ANTHROPIC:
        return AnthropicEvents()
    if route.dialect is Dialect.COHERE:
        return CohereEvents()
    return ResponsesEvents() if route.path.startswith(RESPONSES_PATH) else V1_EVENTS


def lmi_reply(answer: OpenAIReply, content_type: str = "application/json") -> Reply:
    """Return vLLM's answer, JSON with a final newline, or its stream as `content_type`.

    Raises:
        LmiError: vLLM's error object, as the error of ours that has its meaning and text.
    """
    if answer.stream is not None:
        return Reply(200, content_type, stream=answer.stream)
    if answer.status >= 400:  # noqa: PLR2004 (an error status)
        raise error_of(answer.body)
    newline = b"\n" if "json" in answer.content_type else b""  # vectors may be bytes
    return Reply(answer.status, answer.content_type, answer.body + newline, headers=answer.headers)


def unchanged_reply(answer: OpenAIReply) -> Reply:
    """Return vLLM's answer as it is, errors included."""
    return Reply(answer.status, answer.content_type, answer.body, answer.stream, answer.headers)


def error_of(body: bytes) -> LmiError:
    """Return our error with the meaning and text of vLLM's error object."""
    error = orjson.loads(body)["error"]
    text, status = str(error["message"]), int(error["code"])
    if status == 503:  # noqa: PLR2004 (vLLM's own queue limit)
        return NotReadyError(text, retry_after_seconds=1)
    if status >= 500:  # noqa: PLR2004 (the engine's fault, not the client's)
        return EngineFailureError(text)
    return RequestError(text)


def _ended(event: bytes) -> bytes:
    """Return the last event of a response, named by how the response ended."""
    data = _data(event)
    response = data.get("response")
    if not isinstance(response, dict) or response.get("status") != "incomplete":
        return event
    return _framed({**data, "type": "response.incomplete"})


def _data(event: bytes) -> Mapping[str, Any]:
    """Return the object in an event; an empty one if there is none."""
    for line in event.splitlines():
        if line.startswith(_DATA):
            parsed = orjson.loads(line[len(_DATA) :])
            return parsed if isinstance(parsed, dict) else {}
    return {}


def _framed(event: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event))
