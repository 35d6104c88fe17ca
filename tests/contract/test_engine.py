"""What `Engine` promises, each promise over the scripted engine and over vLLM."""

import asyncio
import time

import orjson
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterRefusedError, PayloadError
from lmi_vllm.messages import AdapterRef, GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, answer, collect

PROMPT = "The capital of France is"


def job(max_tokens: int = 8, **fields: object) -> GenerationJob:
    """Return a greedy job over the common prompt."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return GenerationJob("contract", PROMPT, sampling, **fields)


def test_generate_ends_with_finish_reason_and_exact_count(run: LoopThread, engine: Engine) -> None:
    """The last chunk has a finish reason, and max_tokens tokens came out."""
    chunks = run(collect(engine, job(8, is_streaming=True)))
    assert chunks[-1].finish_reason == "length"
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert sum(len(chunk.tokens) for chunk in chunks) == 8
    assert chunks[-1].prompt_tokens > 0


def test_generate_streamed_deltas_add_up_to_whole_answer(run: LoopThread, engine: Engine) -> None:
    """Streamed or not, the same greedy tokens and text come out."""
    streamed = run(collect(engine, job(is_streaming=True)))
    (whole,) = run(collect(engine, job()))
    assert "".join(chunk.text for chunk in streamed) == whole.text
    assert [t.id for chunk in streamed for t in chunk.tokens] == [t.id for t in whole.tokens]


def test_generate_token_texts_add_up_to_text(run: LoopThread, engine: Engine) -> None:
    """The texts of a chunk's tokens concatenate to the chunk's text."""
    for is_streaming in (True, False):
        for chunk in run(collect(engine, job(is_streaming=is_streaming))):
            assert "".join(token.text for token in chunk.tokens) == chunk.text


def test_generate_has_logprobs_only_when_asked(run: LoopThread, engine: Engine) -> None:
    """Log probabilities cost most of a row: they come only when the job asks."""
    (plain,) = run(collect(engine, job()))
    assert {token.logprob for token in plain.tokens} == {None}
    asked = GenerationJob("contract", PROMPT, {"max_tokens": 4, "logprobs": 0, "temperature": 0.0})
    (chunk,) = run(collect(engine, asked))
    assert all(token.logprob is not None and token.logprob <= 0 for token in chunk.tokens)


async def _wait_until_idle(engine: Engine, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while engine.running_requests:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def test_generate_closed_iterator_frees_request(run: LoopThread, engine: Engine) -> None:
    """Closing the iterator in the middle frees the request within a second."""

    async def scenario() -> bool:
        chunks = engine.generate(job(500, is_streaming=True))
        await anext(chunks)
        assert engine.running_requests == 1
        await chunks.aclose()
        return await _wait_until_idle(engine, 1)

    assert run(scenario())


def test_generate_cancelled_consumer_frees_request(run: LoopThread, engine: Engine) -> None:
    """Cancelling the task that consumes frees the request within a second."""
    if hasattr(engine, "seconds_per_token"):
        engine.seconds_per_token = 0.05

    async def scenario() -> bool:
        task = asyncio.create_task(collect(engine, job(500, is_streaming=True)))
        while not engine.running_requests:  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return await _wait_until_idle(engine, 1)

    assert run(scenario())


def test_generate_too_long_prompt_is_client_fault(run: LoopThread, engine: Engine) -> None:
    """A prompt past the context is refused quickly and the engine stays usable."""
    with pytest.raises(PayloadError):
        run(collect(engine, GenerationJob("long", "moon " * 5000, {"max_tokens": 4})))
    assert run(answer(engine, PROMPT))


def test_openai_stream_ends_with_done(run: LoopThread, engine: Engine) -> None:
    """A streamed OpenAI answer is SSE events, one per item, the last one [DONE]."""

    async def scenario() -> list[bytes]:
        body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
        reply = await engine.answer_openai(OpenAICall("completions", body, {}, "r1"))
        assert reply.stream is not None
        return [event async for event in reply.stream]

    events = run(scenario())
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    assert events[-1] == b"data: [DONE]\n\n"


def test_openai_answer_is_json(run: LoopThread, engine: Engine) -> None:
    """A whole OpenAI answer is a JSON body with status 200."""
    call = OpenAICall("completions", {"prompt": PROMPT, "max_tokens": 3}, {}, "r2")
    reply = run(engine.answer_openai(call))
    assert reply.status == 200
    assert orjson.loads(reply.body)["model"] == "lmi"


def test_openai_closed_stream_frees_request(run: LoopThread, engine: Engine) -> None:
    """Closing a streamed OpenAI answer in the middle frees the request within a second."""

    async def scenario() -> bool:
        body = {"prompt": PROMPT, "max_tokens": 500, "stream": True, "ignore_eos": True}
        reply = await engine.answer_openai(OpenAICall("completions", body, {}, "r3"))
        assert reply.stream is not None
        await anext(reply.stream)
        assert engine.running_requests == 1
        await reply.stream.aclose()
        return await _wait_until_idle(engine, 1)

    assert run(scenario())


def test_load_adapter_refusal_leaves_engine_alive(run: LoopThread, engine: Engine) -> None:
    """An adapter that cannot be loaded is refused by an error of ours; nothing dies."""
    with pytest.raises(AdapterRefusedError):
        run(engine.load_adapter(AdapterRef("broken", "/no/such/folder", 5000)))
    run(engine.check_health())
    assert run(answer(engine, PROMPT))


def test_unload_adapter_ignores_unknown(run: LoopThread, engine: Engine) -> None:
    """Unloading what is not there is no error."""
    run(engine.unload_adapter(AdapterRef("nobody", "/no/such/folder", 5001)))
    run(engine.check_health())
