"""The LMI lane: an `inputs` payload to a typed request, its jobs, their results or rows."""

from collections.abc import Mapping
from typing import Any, Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.context import RequestContext
from lmi_vllm.inference.request.lmi import LmiRequest, parse_lmi_request
from lmi_vllm.inference.response.formatters import (
    Schema,
    StreamFormatter,
    choose_schema,
    encode_results,
    format_result,
    rank_candidates,
)
from lmi_vllm.inference.response.streams import DirectRowWriter, close_iterator, gathered
from lmi_vllm.messages import (
    FRAMINGS,
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    Reply,
)

_FIELDS: Final = frozenset({"inputs", "parameters", "stream", "adapters", "model"})


async def generate(context: RequestContext, payload: Mapping[str, Any]) -> Reply:
    """Answer an `inputs` payload: one prompt or a list, whole or as a stream.

    Raises:
        LmiError: whatever is wrong before the first byte; after it, it is the last row.
    """
    runtime, call = context.runtime, context.call
    request = parse_lmi_request(
        payload, runtime.profile, call.tgi_route, known=runtime.known_requests
    )
    if request.unread:
        runtime.unread_names.warn(request.unread)
    if more := payload.keys() - _FIELDS:
        runtime.unread_names.warn(sorted(more), "field beside inputs")
    if request.is_list:
        context.take_slots("inputs", len(request.prompts) * request.candidates.generated)
    check_length(runtime.engine, request)
    jobs = request_jobs(context, request)
    schema = choose_schema(runtime.profile, call.tgi_route)
    if request.is_streaming:
        return await _stream(context, request, jobs[0], schema)
    async with context.deadline():
        running = [job_result(runtime.engine, request, job, schema) for job in jobs]
        results = await gathered(running)
    body = encode_results(results, is_list=request.is_list, schema=schema)
    return Reply(200, FRAMINGS["json"].content_type, body)


def check_length(engine: Engine, request: LmiRequest) -> None:
    """Check the number of tokens that are wanted.

    Raises:
        PayloadError: the model's context cannot hold them.
    """
    wanted = request.sampling["max_tokens"]
    if isinstance(wanted, int) and wanted > engine.max_model_len:
        raise PayloadError(
            f"parameters.max_new_tokens: {wanted} is more than max_model_len "
            f"({engine.max_model_len})"
        )


def request_jobs(context: RequestContext, request: LmiRequest) -> list[GenerationJob]:
    """Return a job for each prompt, with its adapter or the common one."""
    request_id, prompts = context.call.request_id, len(request.prompts)
    several = len(context.adapters) == prompts
    adapters = context.adapters if several else (context.adapter,) * prompts
    jobs = []
    for position, adapter in enumerate(adapters):
        ref = None if adapter is None else adapter.ref
        jobs.append(make_job(request, request_id, position, ref))
    return jobs


async def _stream(
    context: RequestContext, request: LmiRequest, job: GenerationJob, schema: Schema
) -> Reply:
    framing = context.framing
    formatter = StreamFormatter(request, request.prompts[0], schema, framing)
    limit = context.silence_limit()
    direct = DirectRowWriter(formatter, limit)
    chunks = context.runtime.engine.generate(job, direct)
    context.own_stream(chunks, direct.connect)
    # The status line waits for the first chunk: an error before it has its own status.
    first = await limit.within(anext(chunks, None))
    rows = context.stream_ends.rows(first, chunks, direct)
    return Reply(200, framing.content_type, stream=rows)


def make_job(
    request: LmiRequest, request_id: str, position: int, adapter: AdapterRef | None
) -> GenerationJob:
    """Return the engine's job for one prompt of a request."""
    return GenerationJob(
        request_id=f"{request_id}-{position}" if request.is_list else request_id,
        prompt=request.prompts[position],
        sampling=request.sampling,
        adapter=adapter,
        is_streaming=request.is_streaming,
        apply_model_defaults=request.apply_model_defaults,
        truncate_prompt_tokens=request.truncate,
        priority=request.priority,
        needs_token_texts=request.is_streaming
        or request.details
        or request.candidates.returned > 1,
        beams=request.candidates.beams,
    )


async def job_result(
    engine: Engine, request: LmiRequest, job: GenerationJob, schema: Schema
) -> dict[str, Any]:
    """Return the result of one prompt, once all its sequences are complete."""
    ranked = await job_sequences(engine, request, job)
    return format_result(request, job.prompt, ranked, schema)


async def job_sequences(
    engine: Engine, request: LmiRequest, job: GenerationJob
) -> list[GenerationChunk]:
    """Return the candidates of one prompt, best first, once all are complete."""
    chunks = engine.generate(job)
    try:
        sequences = [chunk async for chunk in chunks if chunk.finish_reason is not None]
    finally:
        await close_iterator(chunks)
    return rank_candidates(sequences, request.candidates)
