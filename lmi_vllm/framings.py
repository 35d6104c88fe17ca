"""How rows are framed, by the names that `output_formatter` has for it: one table for all rooms."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Framing:
    """How one row becomes bytes on the wire; `is_streamed` where it frames rows of a stream."""

    content_type: str
    before: bytes
    after: bytes
    is_streamed: bool = True


_JSON: Final = Framing("application/json", before=b"", after=b"\n", is_streamed=False)
_JSON_LINES: Final = Framing("application/jsonlines", before=b"", after=b"\n")
# By the name of the output formatter that chooses it.
FRAMINGS: Final[Mapping[str, Framing]] = MappingProxyType(
    {
        "json": _JSON,
        "jsonlines": _JSON_LINES,
        "sse": Framing("text/event-stream", before=b"data: ", after=b"\n\n"),
        "3p": _JSON,
        "3p_stream": _JSON_LINES,
    }
)
# Those whose answers LMI meters for third parties' end points.
METERED: Final = ("3p", "3p_stream")
# What of an Accept header chooses the framing of a stream; anything else changes nothing.
ACCEPTED_FRAMINGS: Final[Mapping[str, Framing]] = MappingProxyType(
    {framing.content_type: framing for framing in FRAMINGS.values() if framing.is_streamed}
)
