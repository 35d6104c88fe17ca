"""Tokens that are read where they are made: the same stream, in order, without tasks between."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import AdapterRef, GeneratedToken, GenerationChunk, GenerationJob
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, collect

PROMPT = "The capital of France is"


@dataclass
class Reader:
    """Keeps what it is given; open as `may_read` says."""

    may_read: Callable[[], bool] = lambda: True
    chunks: list[GenerationChunk] = field(default_factory=list)
    tasks: set[object] = field(default_factory=set)
    is_first_over: bool = False

    @property
    def is_open(self) -> bool:
        """See `DirectChunks`."""
        return self.is_first_over and self.may_read()

    def read_chunk(self, chunk: GenerationChunk) -> None:
        """Keep the chunk, and who gave it."""
        self.chunks.append(chunk)
        self.tasks.add(asyncio.current_task())

    def read_token(self, token: int, text: str, logprob: float | None) -> None:
        """Keep the token as a chunk."""
        self.read_tokens([token], [text], None if logprob is None else [logprob])

    def read_tokens(self, ids: list[int], texts: list[str], logprobs: list[float] | None) -> None:
        """Keep the tokens as one chunk."""
        values: Sequence[float | None] = logprobs or [None] * len(ids)
        tokens = tuple(map(GeneratedToken, ids, texts, values))
        self.read_chunk(GenerationChunk(0, tokens, "".join(texts)))


async def read(engine: Engine, job: GenerationJob, reader: Reader) -> int:
    """Let the reader have the whole stream in order; returns how many chunks were yielded."""
    yielded = 0
    async for chunk in engine.generate(job, reader):
        reader.read_chunk(chunk)
        reader.is_first_over = True
        yielded += 1
    return yielded


RANKED = "with ranked candidates"  # whose texts vLLM decodes: all of it goes its way
TRIES = 10  # on a busy machine the engine is ahead of the reader, and vLLM joins its tokens
JOBS: dict[str, dict[str, object]] = {
    "plain": {},
    "with the log probability of each token": {"logprobs": 0},
    RANKED: {"logprobs": 2},
    "until a stop string": {"stop": ["a"], "ignore_eos": False, "max_tokens": 100},
    "stop string kept": {"stop": ["a"], "include_stop_str_in_output": True},
    "sampled": {"temperature": 1.5, "seed": 7, "logprobs": 0},
    "special tokens shown": {"skip_special_tokens": False, "temperature": 2.0, "seed": 3},
    "prompt's log probabilities": {"prompt_logprobs": 1, "logprobs": 0},
    "constrained": {"structured_outputs": {"regex": "[ab]{20}"}},
}


def job_of(fields: dict[str, object], **more: object) -> GenerationJob:
    """Return a streamed job."""
    sampling = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **fields}
    return GenerationJob("direct", PROMPT, sampling, is_streaming=True, **more)


def flat(chunks: list[GenerationChunk]) -> tuple[list[tuple[object, ...]], str, object]:
    """Return tokens, text and the end, without how they were cut into chunks.

    Texts of single tokens depend on the cuts only where vLLM holds text back.
    """
    tokens = [
        (token.id, token.logprob if token.logprob is None else round(token.logprob, 4), token.top)
        for chunk in chunks
        for token in chunk.tokens
    ]
    last = chunks[-1]
    end = (last.finish_reason, last.stop_reason, last.prompt_tokens, bool(last.prompt_logprobs))
    return tokens, "".join(chunk.text for chunk in chunks), end


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "fields"), JOBS.items(), ids=JOBS)
def test_tokens_read_directly_are_those_that_are_yielded(
    run: LoopThread, vllm_engine: Engine, name: str, fields: dict[str, object]
) -> None:
    """Token by token, text and end: nothing is lost, doubled or out of order on the short way."""
    expected = flat(run(collect(vllm_engine, job_of(fields))))
    for _ in range(TRIES):
        reader = Reader()
        yielded = run(read(vllm_engine, job_of(fields), reader))
        assert flat(reader.chunks) == expected
        if name == RANKED:
            assert yielded == len(reader.chunks)
            return
        if len(expected[0]) <= 4 or yielded < len(expected[0]) / 2:
            return
    pytest.fail("the short way was not taken")


@pytest.mark.vllm
def test_tokens_of_a_reader_that_opens_and_closes_stay_in_order(
    run: LoopThread, vllm_engine: Engine
) -> None:
    """What is not read directly is yielded: the two ways share one order."""
    calls = iter(range(10_000))
    reader = Reader(may_read=lambda: next(calls) % 3 != 0)
    run(read(vllm_engine, job_of({"max_tokens": 60, "logprobs": 0}), reader))
    expected = run(collect(vllm_engine, job_of({"max_tokens": 60, "logprobs": 0})))
    assert flat(reader.chunks) == flat(expected)


@pytest.mark.vllm
def test_direct_tokens_switch_no_task(run: LoopThread, vllm_engine: Engine) -> None:
    """All tokens but the first and the last come from vLLM's own output loop."""
    for _ in range(TRIES):
        reader = Reader()
        yielded = run(read(vllm_engine, job_of({"max_tokens": 60}), reader))
        if yielded <= 4:
            break
    assert yielded <= 4
    assert len(reader.tasks) == 2  # the consumer's, and vLLM's


@pytest.mark.vllm
def test_direct_tokens_of_an_adapter(run: LoopThread, vllm_engine: Engine) -> None:
    """The guards around adapters hold on the short way too: slots are taken and given back."""
    ref = AdapterRef("direct", str(DEMO_ADAPTERS / "capitals"), 7701)
    run(vllm_engine.load_adapter(ref))
    try:
        job = job_of({}, adapter=ref)
        reader = Reader()
        run(read(vllm_engine, job, reader))
        assert flat(reader.chunks) == flat(run(collect(vllm_engine, job)))
    finally:
        run(vllm_engine.unload_adapter(ref))


@pytest.mark.vllm
def test_reader_error_ends_only_its_request(run: LoopThread, vllm_engine: Engine) -> None:
    """The output loop of vLLM serves every request: a reader's fault must not be its end."""

    class Faulty(Reader):
        def read_token(self, token: int, text: str, logprob: float | None) -> None:
            raise RuntimeError("a fault of the reader")

    async def scenario() -> list[GenerationChunk]:
        other = asyncio.create_task(collect(vllm_engine, job_of({"max_tokens": 100})))
        with pytest.raises(Exception, match="the engine failed"):
            await read(vllm_engine, job_of({"max_tokens": 500}), Faulty())
        return await other

    chunks = run(scenario())
    assert sum(len(chunk.tokens) for chunk in chunks) == 100
    assert vllm_engine.running_requests == 0


@pytest.mark.vllm
def test_closing_a_directly_read_stream_aborts(run: LoopThread, vllm_engine: Engine) -> None:
    """A client that disconnects while its tokens take the short way frees the engine."""

    async def scenario() -> int:
        fifth = asyncio.Event()

        class Signalling(Reader):
            def read_token(self, token: int, text: str, logprob: float | None) -> None:
                super().read_token(token, text, logprob)
                if len(self.chunks) == 5:
                    fifth.set()

        reader = Signalling()
        task = asyncio.create_task(read(vllm_engine, job_of({"max_tokens": 1500}), reader))
        await fifth.wait()
        task.cancel()
        await asyncio.wait([task])
        assert vllm_engine.running_requests == 0
        return len(reader.chunks)

    assert run(scenario()) < 1500
