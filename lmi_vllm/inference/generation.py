"""The LMI lane between a request and the engine: its jobs, and their results."""

from typing import Any

from lmi_vllm.engine.base import Engine
from lmi_vllm.inference.formatters import Schema, format_result, rank_candidates
from lmi_vllm.inference.payload import LmiRequest
from lmi_vllm.inference.streams import close_iterator, gathered
from lmi_vllm.messages import AdapterRef, GenerationJob


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
