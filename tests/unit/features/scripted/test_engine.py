import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.errors import AdapterRefusedError, EngineDeadError, PayloadError
from lmi_vllm.features.scripted.engine import SCRIPTED_SECONDS, Fail, Pause, ScriptedEngine
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    GeneratedToken,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    ServingProfile,
)
from lmi_vllm.server.engines import engine_factory
from tests.support.assembled import CONFIGURATION, PARTS

CHUNK = GenerationChunk(0, (GeneratedToken(1, "a"),), "a", "stop")


def job(prompt: str = "one two", **fields: Any) -> GenerationJob:
    """Return a job of three tokens."""
    return GenerationJob("r", prompt, {"max_tokens": 3}, **fields)


async def collect(engine: ScriptedEngine, wanted: GenerationJob) -> list[GenerationChunk]:
    """Return all chunks of a job."""
    return [chunk async for chunk in engine.generate(wanted)]


async def test_scripted_engine_follows_its_script() -> None:
    """Chunks come as written, for every job, and jobs are remembered."""
    engine = ScriptedEngine(script=(CHUNK, CHUNK))
    assert await collect(engine, job()) == [CHUNK, CHUNK]
    assert await collect(engine, job("x")) == [CHUNK, CHUNK]
    assert [seen.prompt for seen in engine.jobs] == ["one two", "x"]


async def test_scripted_engine_repeats_prompt_without_script() -> None:
    """By default it repeats the prompt's words up to max_tokens."""
    streamed = await collect(ScriptedEngine(), job(is_streaming=True))
    (whole,) = await collect(ScriptedEngine(), job())
    assert [chunk.text for chunk in streamed] == [" one", " two", " one"]
    assert (whole.text, whole.finish_reason) == (" one two one", "length")
    assert streamed[-1].prompt_tokens == whole.prompt_tokens == 2


async def test_scripted_engine_fails_where_scripted() -> None:
    """A failure is raised at its place, and the request is over."""
    engine = ScriptedEngine(script=(CHUNK, Fail(PayloadError("no"))))
    chunks = engine.generate(job())
    assert await anext(chunks) == CHUNK
    with pytest.raises(PayloadError, match="no"):
        await anext(chunks)
    assert engine.running_requests == 0


async def test_scripted_engine_death_ends_a_pause() -> None:
    """What waits fails when the engine dies, and what comes later at once."""
    engine = ScriptedEngine(script=(Pause(60), CHUNK))
    waiting = asyncio.create_task(collect(engine, job()))
    await asyncio.sleep(0)  # lets the task come to its pause
    assert engine.running_requests == 1
    engine.die()
    for failing in (waiting, collect(engine, job()), engine.check_health()):
        with pytest.raises(EngineDeadError):
            await failing
    await engine.wait_until_dead()


async def test_scripted_engine_closed_iterator_is_over() -> None:
    """Closing a request in the middle ends it."""
    engine = ScriptedEngine(script=(CHUNK, Pause(60)))
    async with contextlib.aclosing(engine.generate(job())) as chunks:
        await anext(chunks)
        assert engine.running_requests == 1
    assert engine.running_requests == 0


async def test_scripted_engine_keeps_adapters_by_name() -> None:
    """Adapters are loaded and forgotten; a newer load of the name is left alone."""
    engine = ScriptedEngine(refused_adapters={"bad": "rank too large"})
    old, new = AdapterRef("a", "/x", 1), AdapterRef("a", "/x", 2)
    await engine.load_adapter(old)
    await engine.load_adapter(new)
    await engine.unload_adapter(old)
    assert engine.adapters == {"a": new}
    with pytest.raises(AdapterRefusedError, match="rank too large"):
        await engine.load_adapter(AdapterRef("bad", "/x", 3))


async def test_scripted_engine_openai_names_model() -> None:
    """OpenAI calls are answered with their kind and model, whole or as events."""
    engine = ScriptedEngine()
    whole = await engine.answer_openai(OpenAICall("completions", {"model": "m"}, {}, "r"))
    assert whole.body == b'{"object":"completions","model":"m"}'
    streamed = await engine.answer_openai(OpenAICall("x", {"stream": True}, {}, "r"))
    assert streamed.stream is not None
    events = [event async for event in streamed.stream]
    assert (len(events), events[-1]) == (4, b"data: [DONE]\n\n")


async def test_the_scripted_engine_takes_every_model(tmp_path: Path) -> None:
    """It reads nothing of it; its pace comes from the environment."""
    factory = engine_factory(
        "scripted",
        {SCRIPTED_SECONDS: "0.5"},
        {},
        "json",
        CONFIGURATION.translator.engines,
        PARTS.engines,
    )
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    arguments = EngineArguments({"model": str(tmp_path)})
    assert (factory.kind(arguments), factory.reads_model) == ("scripted", False)
    await factory.load(arguments)
    engine = await factory.start(arguments, ServingProfile())
    assert engine.seconds_per_token == 0.5
