"""The LMI lane: an `inputs` payload to a typed request, its jobs, their results or rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.context import NAMES_OF_ADAPTERS, RequestContext
from lmi_vllm.inference.request.body import EXAMPLE_BODY, check_limits, check_logprobs
from lmi_vllm.inference.request.parameters import (
    GenerationParameters,
    parse_parameters,
    unread_names,
)
from lmi_vllm.inference.request.sampling import (
    Candidates,
    as_in_tgi,
    choose_candidates,
    is_sampling,
    request_sampling,
    wants_details,
)
from lmi_vllm.inference.response.formatters import (
    Schema,
    StreamFormatter,
    choose_schema,
    encode_results,
    format_result,
    rank_candidates,
    streams_by_default,
)
from lmi_vllm.inference.response.streams import DirectRowWriter, close_iterator, gathered
from lmi_vllm.messages import (
    FRAMINGS,
    METERED,
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    Reply,
    ServingProfile,
    TgiRoute,
)

_FIELDS: Final = frozenset({"inputs", "parameters", "stream", "adapters", "model"})


@dataclass(frozen=True, slots=True)
class LmiRequest:
    """One validated LMI generation request; `unread` are its names without effect."""

    prompts: tuple[str, ...]
    is_list: bool
    is_streaming: bool
    sampling: Mapping[str, object]
    apply_model_defaults: bool
    candidates: Candidates
    truncate: int | None
    priority: int
    seed: int | None
    details: bool
    decoder_input_details: bool
    return_full_text: bool
    top_n_tokens: int
    wants_logprobs: bool
    unread: tuple[str, ...] = ()


async def generate(context: RequestContext, payload: Mapping[str, Any]) -> Reply:
    """Answer an `inputs` payload: one prompt or a list, whole or as a stream.

    Raises:
        LmiError: whatever is wrong before the first byte; after it, it is the last row.
    """
    runtime, call = context.runtime, context.call
    request = parse_lmi_request(payload, runtime.profile, call.tgi_route)
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
    adapters = context.adapters if several else [context.adapter] * prompts
    refs = [None if adapter is None else adapter.ref for adapter in adapters]
    return [make_job(request, request_id, position, ref) for position, ref in enumerate(refs)]


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
    first = await limit.next(chunks)
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


def parse_lmi_request(
    payload: Mapping[str, Any],
    profile: ServingProfile,
    tgi_route: TgiRoute | None = None,
    *,
    has_token_hook: bool = False,
) -> LmiRequest:
    """Return the typed request of an `inputs` payload; TGI's own routes have their defaults.

    A token hook gets log probabilities, too.

    Raises:
        PayloadError: names the field and what is allowed.
    """
    prompts, is_list = _prompts(payload, tgi_route)
    parameters = _parameters(payload, profile)
    if profile.tgi_compat:
        parameters = as_in_tgi(parameters)
    check_logprobs(parameters.given(), profile.limits)
    is_streaming = _is_streaming(payload, parameters, profile, tgi_route)
    is_list = is_list and not (is_streaming and len(prompts) == 1)  # LMI's client lists one
    candidates = choose_candidates(parameters)
    wants_logprobs = has_token_hook or _wants_logprobs(
        parameters, profile, candidates, is_streaming=is_streaming
    )
    request = LmiRequest(
        prompts=prompts,
        is_list=is_list,
        is_streaming=is_streaming,
        sampling=request_sampling(parameters, profile, candidates, wants_logprobs, tgi_route),
        apply_model_defaults=is_sampling(parameters),
        candidates=candidates,
        truncate=parameters.truncate,
        priority=parameters.priority or 0,
        seed=parameters.seed,
        details=wants_details(parameters, profile, tgi_route),
        decoder_input_details=bool(parameters.decoder_input_details),
        return_full_text=bool(parameters.return_full_text),
        top_n_tokens=parameters.top_n_tokens or 0,
        wants_logprobs=wants_logprobs,
        unread=_unread(parameters, profile),
    )
    _check_stream(request, is_tgi=bool(tgi_route) or profile.tgi_compat)
    return request


def _unread(parameters: GenerationParameters, profile: ServingProfile) -> tuple[str, ...]:
    names = [*unread_names(parameters)]
    if not (profile.enable_lora or profile.tgi_compat):
        given = parameters.given()
        names += [name for name in NAMES_OF_ADAPTERS if name in given]
    if parameters.priority and not profile.uses_priority:
        names.append("priority")
    return tuple(names)


def _wants_logprobs(
    parameters: GenerationParameters,
    profile: ServingProfile,
    candidates: Candidates,
    *,
    is_streaming: bool,
) -> bool:
    """Whether rows have log probabilities: by default streamed rows and detail tokens do.

    TGI's clients always need them.
    """
    if profile.tgi_compat:
        return True
    if parameters.logprobs is False or profile.output_formatter in METERED:
        return False
    if not is_streaming:
        return bool(parameters.details) or candidates.returned > 1
    return profile.stream_logprobs


def _is_streaming(
    payload: Mapping[str, Any],
    parameters: GenerationParameters,
    profile: ServingProfile,
    tgi_route: TgiRoute | None,
) -> bool:
    stream = payload.get("stream")
    stream = parameters.stream if stream is None else stream
    if stream is not None and not isinstance(stream, bool):
        raise PayloadError("stream: expected true or false")
    if tgi_route:
        return bool(stream if tgi_route.is_streaming is None else tgi_route.is_streaming)
    return bool(stream) or streams_by_default(profile.output_formatter)


def _check_stream(request: LmiRequest, *, is_tgi: bool) -> None:
    if not request.is_streaming:
        return
    if request.is_list:
        raise PayloadError("inputs: streaming takes one prompt, not a list")
    if request.candidates.generated > 1:
        raise PayloadError("parameters: n, best_of and num_beams above 1 cannot be streamed")
    if request.decoder_input_details and is_tgi:  # as in TGI
        raise PayloadError("parameters.decoder_input_details: not available when streaming")


def _prompts(
    payload: Mapping[str, Any], tgi_route: TgiRoute | None
) -> tuple[tuple[str, ...], bool]:
    """The prompts, and whether they came as a list."""
    if "inputs" not in payload:
        raise PayloadError(f"inputs: expected text; example: {EXAMPLE_BODY}")
    inputs = payload["inputs"]
    if isinstance(inputs, str):
        prompts, is_list = (inputs,), False
    elif isinstance(inputs, list) and all(isinstance(item, str) for item in inputs):
        prompts, is_list = tuple(inputs), True
    else:
        raise PayloadError("inputs: expected text or a list of texts")
    if not prompts or "" in prompts:
        raise PayloadError("inputs: an empty prompt is not allowed")
    if tgi_route and is_list:
        raise PayloadError("inputs: expected text; lists are for /invocations")
    return prompts, is_list


def _parameters(payload: Mapping[str, Any], profile: ServingProfile) -> GenerationParameters:
    raw = payload.get("parameters")
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise PayloadError("parameters: expected an object")
    check_limits(raw, profile.limits, "parameters.")  # first: each wrong value has an error
    return parse_parameters(raw)
