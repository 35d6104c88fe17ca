"""A stream of the Responses API that we cut ends in that API's own events."""

import json
from collections.abc import AsyncIterator

import pytest

from lmi_vllm.errors import DeadlineError, RequestError
from lmi_vllm.inference.response.openai_events import ResponsesEvents

CREATED = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
    b'"response":{"id":"resp_1","status":"in_progress","output":[]}}\n\n'
)
DELTA = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    b'"sequence_number":7,"delta":"data: x"}\n\n'
)
ERROR = DeadlineError("no answer within 2 s (chunked_read_timeout)")


async def _events(*events: bytes) -> AsyncIterator[bytes]:
    for event in events:
        yield event


async def test_responses_events_are_given_on_untouched() -> None:
    """What vLLM says is not altered."""
    given = [event async for event in ResponsesEvents().events(_events(CREATED, DELTA))]
    assert given == [CREATED, DELTA]


def ended(name: str, status: str) -> bytes:
    """Return the last event of a response."""
    data = {"sequence_number": 9, "response": {"status": status}, "type": name}
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def test_response_that_was_cut_ends_as_incomplete() -> None:
    """Where vLLM says `response.completed` beside the status `incomplete`; others stay."""
    last = ended("response.completed", "completed")
    cut = ended("response.completed", "incomplete")
    for given, sent in ((last, last), (cut, ended("response.incomplete", "incomplete"))):
        events = ResponsesEvents().events(_events(CREATED, given))
        assert [event async for event in events] == [CREATED, sent]


def test_fault_of_the_client_has_a_code_of_its_own() -> None:
    """Not the server's."""
    assert b'"code":"invalid_prompt"' in ResponsesEvents().error(RequestError("a dead end"))


# What has come before the cut -> the exact end.
ENDS = {
    "in its midst": (
        (CREATED, DELTA),
        b'event: error\ndata: {"type":"error","code":"server_error","message":"no answer within '
        b'2 s (chunked_read_timeout)","param":null,"sequence_number":8}\n\n'
        b'event: response.failed\ndata: {"type":"response.failed","response":{"id":"resp_1",'
        b'"status":"failed","output":[],"error":{"code":"server_error","message":"no answer '
        b'within 2 s (chunked_read_timeout)"}},"sequence_number":9}\n\n',
    ),
    "before its first event": (
        (),
        b'event: error\ndata: {"type":"error","code":"server_error","message":"no answer within '
        b'2 s (chunked_read_timeout)","param":null,"sequence_number":0}\n\n',
    ),
}


@pytest.mark.parametrize(("events", "end"), ENDS.values(), ids=ENDS)
async def test_interrupted_responses_end_in_openai_events(
    events: tuple[bytes, ...], end: bytes
) -> None:
    """Named events with the next numbers; the response is the one that was created."""
    from openai.types.responses import ResponseErrorEvent  # noqa: PLC0415 (slow)

    dialect = ResponsesEvents()
    async for _ in dialect.events(_events(*events)):
        pass
    assert dialect.error(ERROR) == end
    first = end.partition(b"data: ")[2].partition(b"\n")[0]
    ResponseErrorEvent.model_validate(json.loads(first))
