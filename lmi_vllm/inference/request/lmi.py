"""An LMI generation request: an `inputs` payload, validated."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.body import EXAMPLE_BODY
from lmi_vllm.inference.request.limits import check_limits, check_logprobs
from lmi_vllm.inference.request.parameters import (
    GenerationParameters,
    Key,
    Repeated,
    parse_parameters,
    plain_key,
    unread_names,
)
from lmi_vllm.inference.request.sampling import (
    Candidates,
    as_in_tgi,
    choose_candidates,
    request_sampling,
    wants_details,
    with_seed,
)
from lmi_vllm.messages import FRAMINGS, METERED, ServingProfile, TgiRoute

ADAPTER_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"
NAMES_OF_ADAPTERS: Final = ("adapters", "adapter_id")  # in `parameters`
_NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
)


class LmiRequest(NamedTuple):
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


KnownRequests = Repeated[LmiRequest]  # without their prompts, of one profile


def parse_lmi_request(
    payload: Mapping[str, Any],
    profile: ServingProfile,
    tgi_route: TgiRoute | None = None,
    *,
    has_token_hook: bool = False,  # which gets log probabilities
    known: KnownRequests | None = None,
) -> LmiRequest:
    """Return the typed request of an `inputs` payload; TGI's own routes have their defaults.

    Raises:
        PayloadError: names the field and what is allowed.
    """
    prompts, is_list = _prompts(payload, tgi_route)
    request, key = None, None
    if known is not None and (key := _key(payload, profile, tgi_route, has_token_hook)):
        request = known.find(key)
    if request is None:
        request = _without_prompts(payload, profile, tgi_route, has_token_hook=has_token_hook)
        # Without lists, which might be changed.
        if known is not None and key is not None and plain_key(request.sampling) is not None:
            known.keep(key, request)
    # LMI's client lists one prompt of a stream.
    is_list = is_list and not (request.is_streaming and len(prompts) == 1)
    request = request._replace(prompts=prompts, is_list=is_list)
    if request.is_streaming:
        _check_stream(request, is_tgi=bool(tgi_route) or profile.tgi_compat)
    return request


def _key(
    payload: Mapping[str, Any],
    profile: ServingProfile,
    tgi_route: TgiRoute | None,
    has_token_hook: bool,
) -> Key | None:
    """Return what a request is read from beside its prompts; None if it is not to be kept."""
    if profile.tgi_compat:  # each may have a seed of its own
        return None
    parameters, stream = payload.get("parameters"), payload.get("stream")
    given = {} if parameters is None else parameters
    key = plain_key(given) if type(given) is dict else None
    if key is None or type(stream) not in (bool, type(None)):
        return None
    return *key, stream, tgi_route, has_token_hook


def _without_prompts(
    payload: Mapping[str, Any],
    profile: ServingProfile,
    tgi_route: TgiRoute | None,
    *,
    has_token_hook: bool,
) -> LmiRequest:
    """Return the request without its prompts, which nothing else depends on."""
    parameters = _parameters(payload, profile)
    is_streaming = _is_streaming(payload, parameters, profile, tgi_route)
    candidates = choose_candidates(parameters)
    wants_logprobs = has_token_hook or _wants_logprobs(
        parameters, profile, candidates, is_streaming=is_streaming
    )
    sampling = request_sampling(parameters, profile, candidates, wants_logprobs, tgi_route)
    return LmiRequest(
        prompts=(),
        is_list=False,
        is_streaming=is_streaming,
        sampling=sampling,
        apply_model_defaults=sampling.get("temperature") != 0.0,  # a greedy request has 0
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


def _unread(parameters: GenerationParameters, profile: ServingProfile) -> tuple[str, ...]:
    names = [*unread_names(parameters)]
    if not (profile.enable_lora or profile.tgi_compat):
        for name in NAMES_OF_ADAPTERS:
            if getattr(parameters, name) is not None:
                names.append(name)
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
    parameters = parse_parameters(raw)
    check_logprobs(parameters.__dict__, profile.limits)
    return with_seed(as_in_tgi(parameters)) if profile.tgi_compat else parameters


def streams_by_default(output_formatter: str | None) -> bool:
    """Whether that formatter streams the answers of requests without `stream`."""
    framing = FRAMINGS.get(output_formatter or "")
    return framing is not None and framing.is_streamed


def completion_request(request: LmiRequest, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's completion request that means the same as an LMI one."""
    prompt: Any = list(request.prompts) if request.is_list else request.prompts[0]
    body: dict[str, Any] = {"prompt": prompt, "stream": request.is_streaming}
    if not request.apply_model_defaults:
        body |= _NEUTRAL
    body |= request.sampling
    if request.truncate is not None:
        body["truncate_prompt_tokens"] = request.truncate
    if request.priority:
        body["priority"] = request.priority
    if (beams := request.candidates.beams) is not None:
        body |= {"use_beam_search": True, "n": beams.width}
        body["length_penalty"] = beams.length_penalty
    if request.return_full_text:
        body["echo"] = True
    return body | {key: payload[key] for key in ("adapters", "model") if key in payload}
