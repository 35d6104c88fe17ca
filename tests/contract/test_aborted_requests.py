"""What the engine ends by itself is an error, and only its server may tell it to end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import orjson
import psutil
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm import outputs
from lmi_vllm.errors import EngineFailureError
from lmi_vllm.messages import GenerationJob, OpenAICall
from tests.contract.conftest import LoopThread, collect

pytestmark = pytest.mark.vllm
PROMPT = "Once upon a time"
LONG = {"max_tokens": 1500, "ignore_eos": True}
SAID = "the engine ended this request before its answer was complete"


def job(name: str, **fields: Any) -> GenerationJob:
    """Return a job that runs until it is ended."""
    sampling = LONG | fields.pop("sampling", {})
    return GenerationJob(name, PROMPT, sampling, **fields)


def call(kind: str, *, stream: bool) -> OpenAICall:
    """Return an OpenAI call that runs until it is ended."""
    prompt: dict[str, object] = {"prompt": PROMPT}
    if kind == "chat/completions":
        prompt = {"messages": [{"role": "user", "content": PROMPT}]}
    return OpenAICall(kind, {**prompt, **LONG, "stream": stream}, {}, f"cut {kind} {stream}")


async def paused(engine: Engine, running: Coroutine[Any, Any, Any]) -> Any:
    """Return what becomes of a call during which the engine is paused as `POST /pause` does it."""
    llm: Any = engine._llm  # type: ignore[attr-defined]
    before = engine.progress
    task = asyncio.create_task(running)
    while engine.progress < before + 3:  # noqa: ASYNC110 (an engine has no event of it)
        await asyncio.sleep(0.01)
    await llm.pause_generation()
    try:
        return await asyncio.wait_for(asyncio.shield(task), 10)
    finally:
        await llm.resume_generation()
        assert not llm.output_processor.request_states


async def rest(stream: AsyncIterator[bytes]) -> bytes:
    """Return all bytes of a stream."""
    return b"".join([piece async for piece in stream])


@pytest.mark.parametrize(
    "fields",
    [
        {"is_streaming": True},
        {},
        {"sampling": {"logprobs": 3}},
        {"sampling": {"n": 2, "temperature": 1.0}},
    ],
    ids=["stream", "whole", "logprobs", "n"],
)
def test_job_that_the_engine_ends_fails(
    run: LoopThread, vllm_engine: Engine, fields: dict[str, Any]
) -> None:
    """It is no whole answer, however it was asked for; the next one is."""
    with pytest.raises(EngineFailureError, match=SAID):
        run(paused(vllm_engine, collect(vllm_engine, job("cut", **fields))))
    after = run(collect(vllm_engine, GenerationJob("after", PROMPT, {"max_tokens": 3})))
    assert after[-1].finish_reason == "length"


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_openai_answer_that_the_engine_ends_is_a_500(
    run: LoopThread, vllm_engine: Engine, kind: str
) -> None:
    """It is in the form of vLLM's errors, and says why."""
    reply = run(paused(vllm_engine, vllm_engine.answer_openai(call(kind, stream=False))))
    assert reply.status == 500
    assert SAID in orjson.loads(reply.body)["error"]["message"]


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_openai_stream_that_the_engine_ends_says_so(
    run: LoopThread, vllm_engine: Engine, kind: str
) -> None:
    """The last event before the end is an error, and no event has a finish reason."""

    async def stream() -> bytes:
        reply = await vllm_engine.answer_openai(call(kind, stream=True))
        assert reply.stream is not None
        return await rest(reply.stream)

    events = run(paused(vllm_engine, stream())).split(b"\n\n")
    assert SAID.encode() in events[-3]
    assert orjson.loads(events[-3].removeprefix(b"data: "))["error"]["code"] == 500
    assert not any(b'"finish_reason":"' in event for event in events)


def test_vector_that_the_engine_ends_fails_alone(run: LoopThread, embedder: Engine) -> None:
    """VLLM's output processor ended every request with an assertion."""
    llm: Any = embedder._llm  # type: ignore[attr-defined]

    async def scenario() -> tuple[int, int]:
        await llm.pause_generation(mode="keep")
        body = {"input": "held"}
        held = asyncio.create_task(
            embedder.answer_openai(OpenAICall("embeddings", body, {}, "held"))
        )
        while not llm.output_processor.request_states:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        await llm.pause_generation()
        cut = await asyncio.wait_for(held, 10)
        await llm.resume_generation()
        after = await embedder.answer_openai(OpenAICall("embeddings", {"input": "x"}, {}, "after"))
        return cut.status, after.status

    assert run(scenario()) == (500, 200)


def test_plain_vllm_takes_a_paused_request_for_complete(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aborted_requests`: 200 and a finish reason that OpenAI's clients do not know."""
    unchanged: Callable[[Any, list[Any]], list[Any]] = lambda _, found: found  # noqa: E731
    monkeypatch.setattr(outputs, "without_aborted", unchanged)
    reply = run(paused(vllm_engine, vllm_engine.answer_openai(call("completions", stream=False))))
    assert reply.status == 200
    assert orjson.loads(reply.body)["choices"][0]["finish_reason"] == "abort"


def test_signals_of_others_end_no_request(run: LoopThread, vllm_engine: Engine) -> None:
    """SIGTERM and SIGINT to the engine, as systemd and Slurm send them to every process."""
    llm: Any = vllm_engine._llm  # type: ignore[attr-defined]
    (engine,) = llm.engine_core.resources.engine_manager.processes
    assert psutil.Process(engine.pid).ppid() == os.getpid()
    sender = (
        f"import os, signal; os.kill({engine.pid}, signal.SIGTERM); "
        f"os.kill({engine.pid}, signal.SIGINT)"
    )

    async def scenario() -> int:
        chunks = vllm_engine.generate(
            GenerationJob("goes on", PROMPT, {**LONG, "max_tokens": 200}, is_streaming=True)
        )
        await anext(chunks)
        kill = await asyncio.create_subprocess_exec("python3", "-c", sender)
        assert await kill.wait() == 0
        return 1 + sum([len(chunk.tokens) async for chunk in chunks])

    assert run(scenario()) == 200
    run(vllm_engine.check_health())
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
