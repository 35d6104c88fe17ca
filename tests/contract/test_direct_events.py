"""OpenAI streams on the short way: the bytes of vLLM's handler, whatever the request."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import OpenAICall
from tests.contract.conftest import LoopThread

pytestmark = pytest.mark.vllm
COMPLETION = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0, "max_tokens": 24, "ignore_eos": True,
}  # fmt: skip
USAGE = {"stream_options": {"include_usage": True}}
RUNNING_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# The bodies, and whether their text may take the short way.
SHORT: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage at the end": USAGE,
    "stop string": {"stop": ["e"], "min_tokens": 12},
    "stop string kept": {"stop": ["e"], "min_tokens": 12, "include_stop_str_in_output": True},
    "text held back": {"stop": ["a stop string that never comes"], **USAGE},
    "sampled wildly": {"temperature": 2.0, "seed": 11, "skip_special_tokens": False, **USAGE},
    "constrained": {"structured_outputs": {"regex": '[\\\\"\\n\\tä]{20}'}},
    "minimum": {"min_tokens": 5},
}
LONG: dict[str, dict[str, Any]] = {
    "two choices": {"n": 2, "temperature": 1.0, "seed": 5},
    "echo": {"echo": True},
    "token ids": {"return_token_ids": True},
    "usage all the time": RUNNING_USAGE,
    "one token": {"max_tokens": 1},
    "beams": {"use_beam_search": True, "n": 2},
}
ONLY_COMPLETION = {
    "log probabilities": {"logprobs": 1},
    "two prompts": {"prompt": ["Once", "There"]},
    "token prompt": {"prompt": [5, 6, 7]},
}
ONLY_CHAT = {
    "log probabilities": {"logprobs": True, "top_logprobs": 1},
    "refused": {"tools": [TOOL], "tool_choice": "auto"},
}
CASES = [
    pytest.param(kind, {**base, **more}, is_short, id=f"{kind}, {name}")
    for kind, base, only in (
        ("completions", COMPLETION, ONLY_COMPLETION),
        ("chat/completions", CHAT, ONLY_CHAT),
    )
    for cases, is_short in ((SHORT, True), ({**LONG, **only}, False))
    for name, more in cases.items()
]


@dataclass
class Wire:
    """Keeps the events of a stream in the order in which they come, on both ways."""

    may_read: Callable[[], bool] = lambda: True
    events: list[bytes] = field(default_factory=list)
    direct: int = 0
    is_waiting: bool = False

    @property
    def is_open(self) -> bool:
        """See `DirectEvents`."""
        return self.is_waiting and self.may_read()

    def read_event(self, event: bytes) -> None:
        """Keep the event and count it."""
        self.events.append(event)
        self.direct += 1


async def read(engine: Engine, call: OpenAICall, wire: Wire | None) -> list[bytes]:
    """Return a reply's events, those of the short way among them."""
    reply = await engine.answer_openai(call, wire)
    wire = wire or Wire()
    if reply.stream is None:
        return [reply.body]
    while True:
        wire.is_waiting = True
        event = await anext(reply.stream, None)
        wire.is_waiting = False
        if event is None:
            return wire.events
        wire.events.append(event)


TRIES = 10  # on a busy machine the engine is ahead of the reader, and vLLM joins its tokens
_TEXT = re.compile(rb'"(?:text|content)":"((?:[^"\\]|\\.)*)"')


def normal(events: list[bytes]) -> tuple[list[bytes], bytes]:
    """Return the frames in their order, equal neighbours once, and the whole text.

    vLLM joins the tokens of a consumer that lags, also with the last one: where a text is cut, and
    how much of it stands in the frame that ends it, differs from request to request.
    """
    frames: list[bytes] = []
    text = b""
    for event in events:
        event = re.sub(rb'"created":\d+', b'"created":0', event)  # noqa: PLW2901 (a normal form)
        match = _TEXT.search(event)
        text += match[1] if match else b""
        frame = _TEXT.sub(b'"text"', event, count=1)
        if not frames or frames[-1] != frame:
            frames.append(frame)
    return frames, text


def test_normal_form_joins_texts_with_escapes() -> None:
    """Tokens in one event or in two are the same; another text or another end is not."""
    frame = b'data: {"created":%d,"choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n'
    last = frame.replace(b"null", b'"length"')
    cut = [frame % (1, rb"\"\n"), frame % (2, rb"\\"), last % (2, b"a")]
    assert normal(cut) == normal([frame % (3, rb"\"\n\\a"), last % (3, b"")])
    assert normal(cut) == normal([frame % (3, rb"\""), last % (3, rb"\n\\a")])
    assert normal(cut) != normal([frame % (3, rb"\"\n\\"), last % (3, b"")])
    assert normal(cut) != normal([frame % (3, rb"\"\n\\a")])
    assert normal(cut) != normal([last % (3, b""), frame % (3, rb"\"\n\\a")])


@pytest.mark.parametrize(("kind", "body", "is_short"), CASES)
def test_events_of_the_short_way_are_the_handler_s(
    run: LoopThread, vllm_engine: Engine, kind: str, body: dict[str, Any], is_short: bool
) -> None:
    """The same bytes but for the cuts; only streams that say nothing but text go the short way."""
    call = OpenAICall(kind, {**body, "model": "lmi", "stream": True}, {}, "direct")
    for _ in range(TRIES if is_short else 1):
        expected, expected_text = normal(run(read(vllm_engine, call, None)))
        events, text = normal(run(read(vllm_engine, call, wire := Wire())))
        assert text == expected_text or not is_short
        if wire.direct > 3 and events == expected:  # tokens that are all joined have one frame less
            break
    assert events == expected or not is_short
    assert (wire.direct > 3) if is_short else (wire.direct == 0)


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_events_stay_in_order_when_the_short_way_opens_and_closes(
    run: LoopThread, vllm_engine: Engine, kind: str
) -> None:
    """A client that reads now and then gets the same text and the same counts."""
    base = COMPLETION if kind == "completions" else CHAT
    call = OpenAICall(kind, {**base, **USAGE, "model": "lmi", "stream": True}, {}, "direct")
    for _ in range(TRIES):
        expected, expected_text = normal(run(read(vllm_engine, call, None)))
        calls = iter(range(10_000))
        wire = Wire(may_read=lambda calls=calls: next(calls) % 3 != 0)
        events, text = normal(run(read(vllm_engine, call, wire)))
        assert text == expected_text
        if wire.direct > 3 and events == expected:
            break
    assert events == expected
    assert wire.direct > 3


def test_concurrent_streams_do_not_mix(run: LoopThread, vllm_engine: Engine) -> None:
    """Each stream has a frame of its own: ids and texts never reach another one."""

    async def scenario() -> None:
        calls = [
            OpenAICall("completions", {**COMPLETION, "prompt": text, "stream": True}, {}, text)
            for text in ("Once", "Sea", "Cat")
        ]
        alone = [normal(await read(vllm_engine, call, None)) for call in calls]
        together = await asyncio.gather(*(read(vllm_engine, call, Wire()) for call in calls))
        for call, events in zip(calls, together, strict=True):
            own = f'"id":"cmpl-{call.request_id}'.encode()
            assert all(own in event for event in events if event != b"data: [DONE]\n\n")
        assert [normal(events) for events in together] == alone

    run(scenario())
