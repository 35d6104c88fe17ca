"""Framings: how a row becomes bytes on the wire, by the names `output_formatter` has for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import orjson


@dataclass(frozen=True, slots=True)
class Framing:
    """How one row becomes bytes on the wire; `is_streamed` where it frames rows of a stream."""

    content_type: str
    before: bytes
    after: bytes
    is_streamed: bool = True

    def frame(self, row: object) -> bytes:
        """Return `row` as one framed event."""
        return self.before + orjson.dumps(row) + self.after


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


def choose_framing(accept: str, output_formatter: str | None, *, tgi_compat: bool) -> Framing:
    """Return the framing of a stream: what Accept asks for, then what is configured."""
    for part in accept.split(","):
        framing = ACCEPTED_FRAMINGS.get(part.split(";")[0].strip().lower())
        if framing is not None:
            return framing
    if streams_by_default(output_formatter):
        return FRAMINGS[str(output_formatter)]
    return FRAMINGS["sse" if tgi_compat else "jsonlines"]


def streams_by_default(output_formatter: str | None) -> bool:
    """Whether that formatter streams the answers of requests that do not say."""
    framing = FRAMINGS.get(output_formatter or "")
    return framing is not None and framing.is_streamed
