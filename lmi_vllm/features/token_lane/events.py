"""Events of vLLM's OpenAI streams that differ only in their text, made without its handler.

The first event of a stream with text is the handler's own. If the rest of it is constant, it is the
template of the next events. What such an event looks like is learnt once for each shape of a
stream; in those of other requests only id, time and model may differ. The handler also makes the
last event, and every event of a stream with more than text: log probabilities, token ids, usage so
far, tools, reasoning, several choices. pydantic encodes the text, as in vLLM.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
from pydantic_core import to_json

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.features.token_lane.readers import InLane, LaneRequest

_DATA: Final = b"data: "
_FIELDS: Final = {"id", "object", "created", "model", "choices"}
_CONSTANT: Final = "system_fingerprint"  # from vLLM 0.33, the same in every event of an engine
_LAST_ONLY: Final = "kv_transfer_params"  # from vLLM 0.33, null in all but the last event
_TRIES: Final = 4  # events looked at: a role may come first
_STRING: Final = rb'"[^"\\]*(?:\\.[^"\\]*)*"'  # of JSON
# What differs between the events of two requests, beside the text.
_OF_REQUESTS: Final = {"id": _STRING, "created": rb"\d+", "model": _STRING}
# Fields of a body that give its stream other events.
_SHAPING: Final = ("echo", "logprobs", "top_logprobs", "return_token_ids", "tools", "n")
_USAGE: Final = ("include_usage", "continuous_usage_stats")
Shape = tuple[object, ...]


class EventFrames:
    """What the events with nothing but text look like, for each shape of a stream."""

    def __init__(self) -> None:
        self._known: dict[Shape, re.Pattern[bytes]] = {}

    def cut(self, shape: Shape, event: bytes) -> tuple[bytes, bytes] | None:
        """Return what is before and after the text of an event; None if it says anything else."""
        if (known := self._known.get(shape)) is not None:
            match = known.fullmatch(event)
            return match and (match[1], match[2])
        field = _text_field(event)
        if field is None or event.count(field[0] + field[1]) != 1:
            return None
        name, text = field
        before, after = event.split(name + text)
        frame = _frame(event, before + name, after)
        if frame is not None:
            self._known[shape] = frame
        return before + name, after


class TextEvents:
    """The events of one stream, as soon as it is known what they look like."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, direct: DirectEvents, frames: EventFrames, shape: Shape) -> None:
        self._direct = direct
        self._frames, self._shape = frames, shape
        self._sequences = 0
        self._uncounted: list[int] = []
        self._tries = _TRIES
        self._before, self._after = b"", b""
        self.gate = direct
        self.is_ready = False  # to make an event of a text

    def sequences(self) -> InLane:
        """Read the sequences that the body adds."""
        return InLane(LaneRequest(self, counted=self.add_sequence))

    def add_sequence(self) -> None:
        """Count a sequence of the request; more than one are left to the handler."""
        self._sequences += 1
        self.is_ready = bool(self._before) and self._sequences == 1

    def read(self, ids: list[int], text: str, _: object = None) -> None:
        """Hand on the event that carries `text`."""
        self._uncounted += ids
        self._direct.read_event(self._before + to_json(text) + self._after)

    def read_token(self, token: int, text: str, _: object = None) -> None:
        """As `read`, for one token."""
        self._uncounted.append(token)
        self._direct.read_event(self._before + to_json(text) + self._after)

    def read_tokens(self, ids: list[int], texts: list[str], _: object = None) -> None:
        """As `read`, for the joined texts."""
        self.read(ids, "".join(texts))

    def complete(self, output: Any) -> None:
        """Let the handler, which counts tokens at its next output, count those that came here."""
        if self._uncounted and (sequences := getattr(output, "outputs", None)):
            (sequence,) = sequences
            sequence.token_ids = [*self._uncounted, *sequence.token_ids]
            self._uncounted = []

    def learn(self, event: bytes) -> None:
        """Look at an event of the handler's, until one shows what all others look like."""
        if not self._tries:
            return
        self._tries -= 1
        found = self._frames.cut(self._shape, event)
        if found is not None:
            self._before, self._after = found
            self.is_ready = self._sequences == 1
            self._tries = 0


def may_be_direct(kind: str, body: Mapping[str, object], handler: Any) -> bool:
    """Whether nothing but text may be expected of the stream's events, from the second on."""
    if body.get("stream") is not True or body.get("echo") or body.get("use_beam_search"):
        return False
    if kind == "completions":
        return isinstance(body.get("prompt"), str)
    is_chat = kind == "chat/completions"
    return is_chat and handler.parser_cls is None and not handler.enable_log_outputs


def shape_of(kind: str, body: Mapping[str, object]) -> Shape:
    """Return what the form of a stream's events depends on."""
    options = body.get("stream_options")
    usage = options if isinstance(options, dict) else {}
    return kind, *map(bool, map(body.get, _SHAPING)), *map(bool, map(usage.get, _USAGE))


def _frame(event: bytes, before: bytes, after: bytes) -> re.Pattern[bytes] | None:
    """Return the pattern of other requests' events; None if they cannot be told from this one.

    Its groups are what is before and after the text.
    """
    document = orjson.loads(event[len(_DATA) :])
    pattern = re.escape(before)
    for name, any_value in _OF_REQUESTS.items():
        key = b'"%b":' % name.encode()
        written = key + to_json(document[name])
        if before.count(written) != 1:
            return None
        pattern = pattern.replace(re.escape(written), re.escape(key) + any_value)
    return re.compile(b"(%b)%b(%b)" % (pattern, _STRING, re.escape(after)), re.DOTALL)


def _text_field(event: bytes) -> tuple[bytes, bytes] | None:
    """Return name and value of the text in an event that says nothing else, as its bytes."""
    if not event.startswith(_DATA + b"{"):
        return None
    document = orjson.loads(event[len(_DATA) :])
    document.pop(_CONSTANT, None)
    if document.get(_LAST_ONLY) is None:
        document.pop(_LAST_ONLY, None)
    if set(document) != _FIELDS or len(document["choices"]) != 1:
        return None
    choice = dict(document["choices"][0])
    if choice.pop("index", None) != 0:
        return None
    delta = choice.pop("delta", None)
    if delta is not None:
        name, text = "content", delta.get("content") if set(delta) == {"content"} else None
    else:
        name, text = "text", choice.pop("text", None)
    if not isinstance(text, str) or any(value is not None for value in choice.values()):
        return None
    return b'"%b":' % name.encode(), to_json(text)
