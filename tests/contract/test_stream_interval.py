"""Streams that are delivered every few tokens (`stream_interval`), as the token lane delivers them.

Compared with vLLM's own way, which the same engine takes without its lane.
"""

import re
from collections.abc import Iterator
from typing import Final

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm.outputs import EngineOutputs
from lmi_vllm.messages import GenerationChunk, GenerationJob, OpenAICall
from tests.contract import test_direct_events as events
from tests.contract.conftest import LoopThread, collect
from tests.contract.test_direct_tokens import TRIES, Reader
from tests.contract.test_token_lane import JOBS, PROMPT, Taken, counted, said

pytestmark = pytest.mark.vllm
INTERVAL: Final = 7
# Jobs of which the lane takes all but the first and the last token, if they have a reader.
PLAIN: Final = (
    "greedy", "log probabilities", "long", "wild, which cuts characters",
    "wild, special tokens shown", "stop token", "until the end token",
)  # fmt: skip
OTHERS: Final = ("stop string over tokens", "no spaces between", "several", "no text", "two tokens")


@pytest.fixture
def processor(vllm_engine: Engine) -> Iterator[EngineOutputs]:
    """Give the outputs of the session's engine with an interval; its lane is on again later."""
    found: EngineOutputs = vllm_engine._llm.output_processor  # type: ignore[attr-defined]
    lane, interval = found.lane, found.stream_interval
    assert lane is not None
    assert interval == 1
    found.stream_interval = INTERVAL
    yield found
    found.lane, found.stream_interval = lane, interval


def job_of(name: str, *, is_streaming: bool = True) -> GenerationJob:
    """Return a job of the table of requests."""
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **JOBS[name]}
    return GenerationJob("interval", PROMPT, sampling, is_streaming=is_streaming)


@pytest.mark.parametrize("name", PLAIN + OTHERS)
def test_chunks_are_those_of_vllm(
    run: LoopThread, vllm_engine: Engine, processor: EngineOutputs, name: str
) -> None:
    """As many tokens in each, the same texts, and the same in metrics and in the record."""
    job, lane = job_of(name), processor.lane
    for _ in range(TRIES):  # on a busy machine vLLM joins what waits for its reader
        processor.lane, reader = lane, Reader()
        with Taken(processor) as taken:
            found = run(counted(vllm_engine, job, reader))
        with_no_reader = run(collect(vllm_engine, job))
        processor.lane = None
        expected = run(collect(vllm_engine, job))
        assert found == run(counted(vllm_engine, job, None))
        assert said(reader.chunks) == said(with_no_reader) == said(expected)
        texts = [texts_of(chunks) for chunks in (reader.chunks, with_no_reader, expected)]
        if texts[0] == texts[1] == texts[2]:
            break
    assert texts[0] == texts[1] == texts[2]
    if name in PLAIN:
        assert [len(chunk.tokens) for chunk in expected][:2] == [1, INTERVAL]
        assert taken.tokens == len(found[0][0][0]) - 2


def test_whole_answers_have_no_interval(
    run: LoopThread, vllm_engine: Engine, processor: EngineOutputs
) -> None:
    """The lane takes them as ever."""
    job = job_of("greedy", is_streaming=False)
    with Taken(processor) as taken:
        found = run(collect(vllm_engine, job))
    processor.lane = None
    assert said(found) == said(run(collect(vllm_engine, job)))
    assert taken.tokens == 38


@pytest.mark.parametrize("name", ["log probabilities", "wild, which cuts characters"])
def test_tokens_stay_in_order_when_the_reader_opens_and_closes(
    run: LoopThread, vllm_engine: Engine, processor: EngineOutputs, name: str
) -> None:
    """Tokens that were kept when the reader was found closed come from vLLM, once."""
    calls = iter(range(10_000))
    reader = Reader(may_read=lambda: next(calls) % 3 != 0)
    job = job_of(name)
    found = run(counted(vllm_engine, job, reader))
    processor.lane = None
    assert found == run(counted(vllm_engine, job, None))


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
@pytest.mark.parametrize("name", ["plain", "usage at the end", "sampled wildly", "stop string"])
def test_events_are_those_of_vllm(
    run: LoopThread, vllm_engine: Engine, processor: EngineOutputs, kind: str, name: str
) -> None:
    """The same events with the same cuts, whether they are made by vLLM's handler or without.

    Only the cuts may differ for a reader that lags.
    """
    base = events.COMPLETION if kind == "completions" else events.CHAT
    body = {**base, "max_tokens": 60, **events.SHORT[name], "model": "lmi", "stream": True}
    call = OpenAICall(kind, body, {}, "interval")
    lane = processor.lane
    for _ in range(TRIES):
        processor.lane, calls = lane, iter(range(10_000))
        found = run(events.read(vllm_engine, call, wire := events.Wire()))
        half_open = events.Wire(may_read=lambda calls=calls: next(calls) % 3 != 0)
        now_and_then = run(events.read(vllm_engine, call, half_open))
        processor.lane = None
        expected = run(events.read(vllm_engine, call, None))
        assert events.normal(now_and_then)[1] == events.normal(expected)[1]
        if frames(found) == frames(expected):
            break
    assert frames(found) == frames(expected)
    assert wire.direct >= 5 if name != "stop string" else wire.direct == 0


def texts_of(chunks: list[GenerationChunk]) -> list[list[str]]:
    """Return the texts of each chunk's tokens."""
    return [[token.text for token in chunk.tokens] for chunk in chunks]


def frames(made: list[bytes]) -> list[bytes]:
    """Return events without the time of their request."""
    return [re.sub(rb'"created":\d+', b"", event) for event in made]
