"""The LMI lane for a hook that writes the answers token by token."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from lmi_vllm.errors import LmiError
from lmi_vllm.hooks import TokenHook
from lmi_vllm.inference.context import RequestContext
from lmi_vllm.inference.lmi_lane import check_length, job_sequences, request_jobs
from lmi_vllm.inference.request.lmi import parse_lmi_request
from lmi_vllm.inference.response.formatters import frame, lmi_error
from lmi_vllm.inference.response.streams import close_iterator, gathered, invocations_dialect
from lmi_vllm.messages import FRAMINGS, GenerationJob, Reply


async def generate_hooked(
    context: RequestContext, payload: Mapping[str, Any], hook: TokenHook
) -> Reply:
    """Answer an `inputs` payload with what the hook writes; a list of prompts as an array.

    Raises:
        LmiError: whatever is wrong before the first byte; after it, it is the last row.
    """
    runtime, call = context.runtime, context.call
    request = parse_lmi_request(payload, runtime.profile, call.tgi_route, has_token_hook=True)
    runtime.unread_names.warn(request.unread)
    if request.is_list:
        context.take_slots("inputs", len(request.prompts) * request.candidates.generated)
    check_length(runtime.engine, request)
    jobs = [replace(job, needs_token_texts=True) for job in request_jobs(context, request)]
    if request.is_streaming:
        rows = _rows(context, payload, jobs[0], hook)
        return await _stream(context, rows)

    async def body(job: GenerationJob) -> bytes:
        sequences = await job_sequences(runtime.engine, request, job)
        return await hook.whole(call, payload, job.prompt, sequences)

    async with context.deadline():
        bodies = await gathered([body(job) for job in jobs])
    whole = joined(bodies) if request.is_list else bodies[0]
    return Reply(200, FRAMINGS["json"].content_type, whole)


def _rows(
    context: RequestContext, payload: Mapping[str, Any], job: GenerationJob, hook: TokenHook
) -> AsyncIterator[bytes]:
    chunks = context.runtime.engine.generate(job)
    context.own_stream(chunks)
    return hook.rows(context.call, payload, job.prompt, chunks)


async def _stream(context: RequestContext, rows: AsyncIterator[bytes]) -> Reply:
    limit = context.silence_limit()
    # The status line waits for the first row: an error before it has its own status.
    first = await limit.next(rows)
    dialect = invocations_dialect(context.runtime.profile)

    def last_row(error: LmiError) -> bytes:
        row = lmi_error(error.text, context.statuses.of(error, dialect))
        return frame(FRAMINGS["jsonlines"], row)

    stream = context.stream_ends.events(_with_first(first, rows), last_row, limit)
    return Reply(200, FRAMINGS["jsonlines"].content_type, stream=stream)


async def _with_first(first: bytes | None, rows: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        if first is not None:
            yield first
        async for row in rows:
            yield row
    finally:
        await close_iterator(rows)


def joined(bodies: list[bytes]) -> bytes:
    """Return the answers of a list as one array; an answer that is no JSON becomes a text."""
    parts = []
    for body in bodies:
        try:
            orjson.loads(body)
            parts.append(body.strip())
        except orjson.JSONDecodeError:
            parts.append(orjson.dumps(body.decode().removesuffix("\n")))
    return b"[" + b",".join(parts) + b"]\n"
