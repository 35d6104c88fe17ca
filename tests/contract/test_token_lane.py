"""The token lane says, counts and ends what vLLM's own way does, over a table of requests."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.vllm import outputs
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.features.token_lane.lane import PlainLane
from lmi_vllm.messages import AdapterRef, GenerationChunk, GenerationJob, OpenAICall
from lmi_vllm.telemetry.records import RequestRecord, RequestSummary, enter_record
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread, collect
from tests.contract.test_direct_tokens import TRIES, Reader, flat, read

pytestmark = pytest.mark.vllm
PROMPT: Final = "Once upon a time"
# Samplings, each asked streamed with a reader, streamed without, and whole.
JOBS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "log probabilities": {"logprobs": 0},
    "ranked candidates": {"logprobs": 3},
    "long": {"max_tokens": 150, "logprobs": 0},
    "wild, which cuts characters": {"temperature": 2.0, "seed": 3, "max_tokens": 120},
    "wild, special tokens shown": {
        "temperature": 2.0, "seed": 4, "max_tokens": 60, "skip_special_tokens": False,
    },
    "no spaces between": {
        "temperature": 2.0, "seed": 4, "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    },
    "stop string over tokens": {"stop": ["e w"], "max_tokens": 200},
    "stop string kept": {"stop": ["e w"], "include_stop_str_in_output": True, "max_tokens": 200},
    "stop string after a minimum": {"stop": ["e"], "min_tokens": 25},
    "stop string that never comes": {"stop": ["never said"], "logprobs": 0},
    "stop token": {"stop_token_ids": [323, 14, 11], "max_tokens": 200},
    "until the end token": {"ignore_eos": False, "max_tokens": 300},
    "constrained": {"structured_outputs": {"regex": "[ab]{20}"}},
    "prompt's log probabilities": {"prompt_logprobs": 0, "logprobs": 0},
    "several": {"n": 3, "temperature": 1.0, "seed": 5},
    "no text": {"detokenize": False},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}  # fmt: skip


@pytest.fixture
def processor(vllm_engine: Engine) -> Iterator[outputs.EngineOutputs]:
    """Give the lane of the session's engine, and leave it on."""
    found: outputs.EngineOutputs = vllm_engine._llm.output_processor  # type: ignore[attr-defined]
    lane = found.lane
    assert lane is not None
    yield found
    found.lane = lane


class Taken:
    """Counts what the lane takes while the body runs."""

    def __init__(self, processor: outputs.EngineOutputs) -> None:
        self._processor = processor
        self.tokens = 0
        self.has_twenty = asyncio.Event()

    def __enter__(self) -> "Taken":
        take = PlainLane.take

        def counted(lane: PlainLane, outputs: list[Any], *more: Any) -> list[Any]:
            tokens = {output.request_id: len(output.new_token_ids) for output in outputs}
            left = take(lane, outputs, *more)
            self.tokens += sum(tokens.values()) - sum(tokens[one.request_id] for one in left)
            if self.tokens >= 20:
                self.has_twenty.set()
            return left

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(PlainLane, "take", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def metric(name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name
    )


COUNTED: Final = (
    "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
    "vllm:inter_token_latency_seconds_count", "vllm:time_to_first_token_seconds_count",
    "vllm:request_generation_tokens_sum", "vllm:e2e_request_latency_seconds_count",
    "vllm:request_success_total",
)  # fmt: skip


async def counted(engine: Engine, job: GenerationJob, reader: Reader | None) -> tuple[Any, ...]:
    """Return what a job says, what the metrics say of it, and its own record."""
    seen: list[RequestSummary] = []
    record = RequestRecord("lane", "POST", "/", "/", "", "lmi", observers=[seen.append])
    enter_record(record)
    before = [metric(name) for name in COUNTED]
    if reader is None:
        chunks = await collect(engine, job)
    else:
        await read(engine, job, reader)
        chunks = reader.chunks
    enter_record(None)
    record.end(200)
    metrics = [metric(name) - was for name, was in zip(COUNTED, before, strict=True)]
    assert (seen[0].first_token_seconds or 0) >= 0
    assert (seen[0].token_seconds is None) == (seen[0].generated_tokens < 2)
    figures = (seen[0].prompt_tokens, seen[0].generated_tokens)
    return (*said(chunks), metrics, figures)


def said(chunks: list[GenerationChunk]) -> tuple[Any, ...]:
    """Return tokens, texts, ends and log probabilities by sequence."""
    found = []
    for index in sorted({chunk.index for chunk in chunks}):
        mine = [chunk for chunk in chunks if chunk.index == index]
        total = mine[-1].cumulative_logprob
        found.append((flat(mine), None if total is None else round(total, 3)))
    return tuple(found)


FORMS: Final = ("streamed to a reader", "streamed", "whole")


@pytest.fixture(scope="module")
def said_by_vllm() -> dict[tuple[str, bool], tuple[Any, ...]]:
    """Keep what vLLM's own way says of a job; it knows nothing of a reader."""
    return {}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", JOBS)
def test_lane_output_equals_vllm_s(
    run: LoopThread,
    vllm_engine: Engine,
    processor: outputs.EngineOutputs,
    said_by_vllm: dict[tuple[str, bool], tuple[Any, ...]],
    name: str,
    form: str,
) -> None:
    """Tokens, text, log probabilities, ends, metrics and the request's record agree."""
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **JOBS[name]}
    job = GenerationJob("lane", PROMPT, sampling, is_streaming=form != "whole")
    reader = Reader() if form == "streamed to a reader" else None
    found = run(counted(vllm_engine, job, reader))
    expected = said_by_vllm.get((name, job.is_streaming))
    if expected is None:
        processor.lane = None
        expected = run(counted(vllm_engine, job, None))
        said_by_vllm[name, job.is_streaming] = expected
    assert found == expected


TAKEN: Final = ("greedy", "log probabilities", "long", "stop string that never comes")


@pytest.mark.parametrize("form", ["streamed to a reader", "whole"])
@pytest.mark.parametrize("name", TAKEN)
def test_lane_is_used_for_plain_requests(
    run: LoopThread, vllm_engine: Engine, processor: outputs.EngineOutputs, name: str, form: str
) -> None:
    """All but the first and the last token; off, it takes none."""
    sampling = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **JOBS[name]}
    if form == "whole" and "stop" in sampling:
        pytest.skip("a stop string of a whole answer is vLLM's business")
    job = GenerationJob("lane", PROMPT, sampling, is_streaming=form != "whole")

    def tokens() -> int:
        with Taken(processor) as taken:
            if form == "whole":
                run(collect(vllm_engine, job))
            else:
                run(read(vllm_engine, job, Reader()))
        return taken.tokens

    assert any(tokens() > sampling["max_tokens"] * 0.7 for _ in range(TRIES))
    processor.lane = None
    assert tokens() == 0


def test_a_mixture_in_one_batch(
    run: LoopThread, vllm_engine: Engine, processor: outputs.EngineOutputs
) -> None:
    """Every job at once, in every form, some with an adapter: each is as alone and without it."""
    ref = AdapterRef("lane", str(DEMO_ADAPTERS / "capitals"), 8801)
    run(vllm_engine.load_adapter(ref))
    jobs = [
        GenerationJob(
            f"mixed-{name}-{form}", PROMPT,
            {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **sampling},
            is_streaming=form != "whole", adapter=ref if number % 2 else None,
        )
        for number, (name, sampling) in enumerate(JOBS.items())
        for form in FORMS
    ]  # fmt: skip

    async def one(job: GenerationJob) -> tuple[Any, ...]:
        if not job.request_id.endswith("to a reader"):
            return said(await collect(vllm_engine, job))
        reader = Reader()
        await read(vllm_engine, job, reader)
        return said(reader.chunks)

    async def together() -> list[tuple[Any, ...]]:
        return await asyncio.gather(*map(one, jobs))

    try:
        found = run(together())
        processor.lane = None
        alone = {_key(job): run(one(job)) for job in jobs if not job.request_id.endswith("reader")}
    finally:
        run(vllm_engine.unload_adapter(ref))
    for job, one_found in zip(jobs, found, strict=True):
        assert _rounded(one_found) == _rounded(alone[_key(job)]), job.request_id


def _key(job: GenerationJob) -> tuple[str, bool]:
    """Return what decides what vLLM says: it knows nothing of a reader."""
    return job.request_id.removesuffix(" to a reader"), job.is_streaming


def _rounded(sequences: tuple[Any, ...]) -> list[Any]:
    """Return tokens, text and end; a batch's log probabilities differ in their last digits."""
    return [([token[0] for token in one[0][0]], *one[0][1:]) for one in sequences]


def test_an_aborted_sequence_is_counted_as_far_as_it_came(
    run: LoopThread, vllm_engine: Engine, processor: outputs.EngineOutputs
) -> None:
    """Whole or streamed: the record has the tokens that the lane took."""

    async def scenario(form: str) -> tuple[int, int]:
        seen: list[RequestSummary] = []
        record = RequestRecord("lane", "POST", "/", "/", "", "lmi", observers=[seen.append])
        enter_record(record)
        sampling = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        job = GenerationJob("abort", PROMPT, sampling, is_streaming=form != "whole")
        with Taken(processor) as taken:
            waiting = collect(vllm_engine, job) if form == "whole" else read(
                vllm_engine, job, Reader()
            )  # fmt: skip
            task = asyncio.create_task(waiting)
            enter_record(None)
            await taken.has_twenty.wait()
            task.cancel()
            await asyncio.wait([task])
        record.end(499)
        assert not processor.lane._sequences
        return seen[0].generated_tokens, taken.tokens

    for form in ("whole", "streamed to a reader"):
        generated, taken = run(scenario(form))
        assert taken <= generated < 2 * taken  # some came since; none is counted twice


def test_the_engine_s_death_reaches_a_sequence_of_the_lane(
    run: LoopThread, vllm_engine: Engine, processor: outputs.EngineOutputs
) -> None:
    """What the output loop says to all sequences is said to these, too."""

    async def scenario() -> None:
        sampling = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        jobs = [
            GenerationJob(f"death-{whole}", PROMPT, sampling, is_streaming=not whole)
            for whole in (True, False)
        ]
        with Taken(processor) as taken:
            tasks = [
                asyncio.create_task(collect(vllm_engine, jobs[0])),
                asyncio.create_task(read(vllm_engine, jobs[1], Reader())),
            ]
            await taken.has_twenty.wait()
            processor.propagate_error(VllmEngineDeadError())
            for task in tasks:
                with pytest.raises(EngineDeadError):
                    await task
        # It lives, after all.
        llm: Any = vllm_engine._llm  # type: ignore[attr-defined]
        await llm.abort(list(processor.request_states), internal=True)

    run(scenario())
    assert not processor.lane._sequences


def test_lane_is_off_for_releases_with_more_output_fields(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that is not known may change what an output means: one warning, and vLLM's way."""
    assert outputs.may_be_used(object())
    fields = (*EngineCoreOutput.__struct_fields__, "new_kind_of_token")

    class Later:
        __struct_fields__ = fields

    monkeypatch.setattr(outputs, "EngineCoreOutput", Later)
    with caplog.at_level(logging.WARNING):
        assert not outputs.may_be_used(object())
    assert "the token lane is off: this vLLM's outputs also have new_kind_of_token" in caplog.text


def test_lane_is_off_for_settings_with_more_output_fields() -> None:
    """Masks of the sampler and routed experts come with each token, for vLLM to keep."""
    for name in outputs.RICH_OUTPUT_SETTINGS:
        assert not outputs.may_be_used(type("Config", (), {name: True})())


def test_openai_answers_are_the_same(
    run: LoopThread, vllm_engine: Engine, processor: outputs.EngineOutputs
) -> None:
    """Whole answers of the handlers, which the lane reads as well: text, usage and ends."""
    bodies: list[tuple[str, Mapping[str, Any]]] = [
        ("completions", {"prompt": PROMPT}),
        ("completions", {"prompt": PROMPT, "logprobs": 2}),
        ("completions", {"prompt": PROMPT, "echo": True}),
        ("completions", {"prompt": [PROMPT, "There"], "n": 2, "seed": 3}),
        ("completions", {"prompt": PROMPT, "stop": ["e w"], "max_tokens": 200}),
        ("completions", {"prompt": PROMPT, "return_token_ids": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ]

    async def answers() -> list[bytes]:
        found = []
        for kind, body in bodies:
            fields = {"temperature": 0, "max_tokens": 40, **body}
            call = OpenAICall(kind, fields, {}, "same")
            reply = await vllm_engine.answer_openai(call)
            found.append(replace(reply, response=None))
        return [_without_time(reply.body) for reply in found]

    with Taken(processor) as taken:
        ours = run(answers())
    processor.lane = None
    assert ours == run(answers())
    assert taken.tokens > 100


def _without_time(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', body)
