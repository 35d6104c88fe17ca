"""How a stream of the Responses API ends that we had to cut: in that API's own events.

OpenAI's API reference, "Streaming events": every event has a name, a type and a sequence number;
a response that fails ends with `error` and `response.failed`. There is no `[DONE]`.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import orjson

from lmi_vllm.errors import LmiError
from lmi_vllm.inference.response.streams import close_iterator

RESPONSES: Final = "responses"  # the kind of call
_CODE: Final = "server_error"  # the API's one code for faults that are not the request's
_DATA: Final = b"data: "


class ResponsesDialect:
    """One stream of vLLM's events, given on untouched; only its first and last are remembered."""

    def __init__(self) -> None:
        self._first = b""
        self._last = b""

    async def events(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the events as they come."""
        try:
            async for event in events:
                self._first = self._first or event
                self._last = event
                yield event
        finally:
            await close_iterator(events)

    def error(self, error: LmiError) -> bytes:
        """Return `error`, and `response.failed` where the client knows of a response."""
        number = int(_data(self._last).get("sequence_number", -1)) + 1
        last_words = _framed(
            {
                "type": "error",
                "code": _CODE,
                "message": error.text,
                "param": None,
                "sequence_number": number,
            }
        )
        response = _data(self._first).get("response")
        if not isinstance(response, dict):
            return last_words
        failed = {
            **response,
            "status": "failed",
            "error": {"code": _CODE, "message": error.text},
        }
        return last_words + _framed(
            {"type": "response.failed", "response": failed, "sequence_number": number + 1}
        )


def _data(event: bytes) -> Mapping[str, Any]:
    """Return the object that an event carries; an empty one where there is none."""
    for line in event.splitlines():
        if line.startswith(_DATA):
            found = orjson.loads(line[len(_DATA) :])
            return found if isinstance(found, dict) else {}
    return {}


def _framed(event: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), orjson.dumps(event))
