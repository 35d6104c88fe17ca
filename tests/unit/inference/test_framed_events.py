"""vLLM's events in the framing of a route."""

import pytest

from lmi_vllm.errors import Dialect
from lmi_vllm.inference.response.openai_events import FramedEvents
from lmi_vllm.messages import FRAMINGS, Framing

EVENT = b'data: {"a":"\\n"}\n\n'


@pytest.mark.parametrize(
    ("framing", "row"),
    [
        (FRAMINGS["sse"], EVENT),
        (FRAMINGS["jsonlines"], b'{"a":"\\n"}\n'),
        (Framing("application/json-seq", before=b"\x1e", after=b"\n"), b'\x1e{"a":"\\n"}\n'),
    ],
    ids=["sse", "jsonlines", "one with a mark before"],
)
def test_event_is_framed_as_the_route_frames_rows(framing: Framing, row: bytes) -> None:
    """A framing of its own needs nothing but its row of the table."""
    assert FramedEvents(Dialect.LMI, framing).event(EVENT) == row
