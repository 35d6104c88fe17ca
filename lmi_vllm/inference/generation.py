"""The LMI lane: a payload to the engine's jobs, their results or rows to a reply."""

import asyncio
from collections.abc import Mapping
from typing import Any

from lmi_vllm.adapters.selection import adapter_name, adapter_names
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.payload import LmiRequest, parse_lmi_request
from lmi_vllm.inference.request_work import RequestWork
from lmi_vllm.inference.response.formatters import (
    FRAMINGS,
    Schema,
    StreamFormatter,
    choose_schema,
    encode_results,
    format_result,
    rank_candidates,
)
from lmi_vllm.inference.response.stream_ends import DirectRows, StreamEnds
from lmi_vllm.inference.response.streams import (
    DirectStream,
    SilenceLimit,
    close_iterator,
    deadline_error,
    gathered,
)
from lmi_vllm.messages import AdapterRef, GenerationJob, Reply


async def generate(work: RequestWork, payload: Mapping[str, Any]) -> Reply:
    """Answer an `inputs` payload: one prompt or a list, whole or as a stream.

    Raises:
        LmiError: whatever is wrong before the first byte; after it, it is the last row.
    """
    runtime, call = work.runtime, work.call
    request = parse_lmi_request(payload, runtime.profile, call.tgi_route)
    work.unread_names.warn(request.unread)
    if request.is_list:
        work.admit_list("inputs", len(request.prompts) * request.candidates.generated)
    _check_length(runtime.engine, request)
    jobs = await _jobs(work, payload, request)
    schema = choose_schema(runtime.profile, call.tgi_route)
    if request.is_streaming:
        return await _stream(work, request, jobs[0], schema)
    seconds = runtime.profile.predict_timeout
    try:
        async with asyncio.timeout(seconds):
            results = await gather_results(runtime.engine, request, jobs, schema)
    except TimeoutError:
        raise deadline_error(seconds, "predict_timeout") from None
    body = encode_results(results, is_list=request.is_list, schema=schema)
    return Reply(200, FRAMINGS["json"].content_type, body)


def _check_length(engine: Engine, request: LmiRequest) -> None:
    wanted = request.sampling["max_tokens"]
    if isinstance(wanted, int) and wanted > engine.max_model_len:
        raise PayloadError(
            f"parameters.max_new_tokens: {wanted} is more than max_model_len "
            f"({engine.max_model_len})"
        )


async def _jobs(
    work: RequestWork, payload: Mapping[str, Any], request: LmiRequest
) -> list[GenerationJob]:
    """Return a job for each prompt, its adapter held."""
    call, is_adapter = work.call, work.runtime.adapters.__contains__
    if request.is_list:
        names = adapter_names(call, payload, len(request.prompts), is_adapter)
    else:
        names = [adapter_name(call, payload, is_adapter)]
    refs = [await work.adapter(name) for name in names]
    return [make_job(request, call.request_id, position, ref) for position, ref in enumerate(refs)]


async def _stream(
    work: RequestWork, request: LmiRequest, job: GenerationJob, schema: Schema
) -> Reply:
    profile, framing = work.runtime.profile, work.framing()
    formatter = StreamFormatter(request, request.prompts[0], schema, framing)
    limit = SilenceLimit(profile.predict_timeout, "predict_timeout")
    work.hold.callback(limit.close)
    direct = DirectRows(formatter, limit)
    chunks = work.runtime.engine.generate(job, direct)
    work.hold.push_async_callback(close_iterator, chunks)  # also when nothing reads it
    # The status line waits for the first chunk: what fails before it gets a status of its own.
    first = await limit.next(chunks)
    rows = StreamEnds(work.queue, profile).rows(first, chunks, direct)
    return Reply(200, framing.content_type, stream=DirectStream(rows, direct.connect))


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
        beams=request.candidates.beams,
    )


async def gather_results(
    engine: Engine, request: LmiRequest, jobs: list[GenerationJob], schema: Schema
) -> list[dict[str, Any]]:
    """Return one result per job, in order; the first failure ends the others and is raised."""
    return await gathered([_result(engine, request, job, schema) for job in jobs])


async def _result(
    engine: Engine, request: LmiRequest, job: GenerationJob, schema: Schema
) -> dict[str, Any]:
    chunks = engine.generate(job)
    try:
        sequences = [chunk async for chunk in chunks if chunk.finish_reason is not None]
    finally:
        await close_iterator(chunks)
    ranked = rank_candidates(sequences, request.candidates)
    return format_result(request, job.prompt, ranked, schema)
