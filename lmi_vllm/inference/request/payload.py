"""A payload to a typed request: dispatch by key, and LMI's requests (http-api.md 4 and 5)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.bodies import EXAMPLE_BODY
from lmi_vllm.inference.request.candidates import Candidates, choose_candidates
from lmi_vllm.inference.request.limits import check_limits, check_logprobs
from lmi_vllm.inference.request.parameters import (
    GenerationParameters,
    is_sampling,
    parse_parameters,
    sampling_fields,
    top_count,
    unread_names,
)
from lmi_vllm.messages import ServingProfile, TgiRoute


class Family(StrEnum):
    """What a payload asks for; the first that matches wins."""

    GENERATION = "generation"
    COMPLETION = "completions"
    CHAT = "chat/completions"


@dataclass(frozen=True, slots=True)
class LmiRequest:
    """One LMI generation request, validated; `unread` names what of it nobody reads."""

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


def dispatch(payload: Mapping[str, Any]) -> Family:
    """Return the family of a payload.

    Raises:
        PayloadError: no key that any family knows.
    """
    for key, family in (
        ("prompt", Family.COMPLETION),
        ("inputs", Family.GENERATION),
        ("messages", Family.CHAT),
    ):
        if key in payload:
            return family
    raise PayloadError(
        f"Invalid payload: it must contain prompt, inputs, or messages; example: {EXAMPLE_BODY}"
    )


def with_adapter_id(payload: Any, profile: ServingProfile) -> Any:
    """Return the payload with TGI's `adapter_id` as `adapters` where there is none (TGI mode)."""
    if not profile.tgi_compat or not isinstance(payload, dict):
        return payload
    parameters = payload.get("parameters")
    if payload.get("adapters") is not None or not isinstance(parameters, dict):
        return payload
    name = parameters.get("adapter_id")
    return payload if name is None else {**payload, "adapters": name}


def parse_lmi_request(
    payload: Mapping[str, Any], profile: ServingProfile, tgi_route: TgiRoute | None = None
) -> LmiRequest:
    """Return the typed request of an `inputs` payload; TGI's own routes have their defaults.

    Raises:
        PayloadError: names the field and what is allowed.
    """
    if "inputs" not in payload:
        raise PayloadError(f"inputs: expected text; example: {EXAMPLE_BODY}")
    prompts, is_list = _prompts(payload["inputs"])
    if tgi_route and is_list:
        raise PayloadError("inputs: expected text; lists are for /invocations")
    raw = payload.get("parameters")
    if raw is not None and not isinstance(raw, dict):
        raise PayloadError("parameters: expected an object")
    parameters = parse_parameters(raw or {})
    given = dict(parameters)
    check_limits(given, profile.limits, "parameters.")
    check_logprobs(given, profile.limits)
    is_streaming = _is_streaming(payload, parameters, profile, tgi_route)
    candidates = choose_candidates(parameters)
    wants_logprobs = _wants_logprobs(parameters, profile, candidates, is_streaming=is_streaming)
    request = LmiRequest(
        prompts=prompts,
        is_list=is_list,
        is_streaming=is_streaming,
        sampling=_sampling(parameters, profile, candidates, wants_logprobs, tgi_route),
        apply_model_defaults=is_sampling(parameters),
        candidates=candidates,
        truncate=parameters.truncate,
        priority=parameters.priority or 0,
        seed=parameters.seed,
        details=_wants_details(parameters, profile, tgi_route),
        decoder_input_details=bool(parameters.decoder_input_details),
        return_full_text=bool(parameters.return_full_text),
        top_n_tokens=parameters.top_n_tokens or 0,
        wants_logprobs=wants_logprobs,
        unread=_unread(parameters, profile),
    )
    _check_stream(request)
    return request


def _sampling(
    parameters: GenerationParameters,
    profile: ServingProfile,
    candidates: Candidates,
    wants_logprobs: bool,
    tgi_route: TgiRoute | None,
) -> dict[str, Any]:
    fields = sampling_fields(parameters, None) if tgi_route else sampling_fields(parameters)
    if profile.tgi_compat:  # TGI keeps a stop sequence in the text
        fields.setdefault("include_stop_str_in_output", True)
    is_several = candidates.generated > 1
    if is_several:
        fields["n"] = candidates.generated
    count = top_count(parameters)
    if count or wants_logprobs or is_several:  # candidates are ranked by their probability
        fields["logprobs"] = count
    if parameters.decoder_input_details and _wants_details(parameters, profile, tgi_route):
        fields["prompt_logprobs"] = 1
    return fields


def _unread(parameters: GenerationParameters, profile: ServingProfile) -> tuple[str, ...]:
    names = [*unread_names(parameters)]
    if parameters.adapter_id is not None and not profile.tgi_compat:
        names.append("adapter_id")
    if parameters.priority and not profile.uses_priority:
        names.append("priority")
    return tuple(names)


def _wants_details(
    parameters: GenerationParameters, profile: ServingProfile, tgi_route: TgiRoute | None
) -> bool:
    if tgi_route:  # TGI 3: either of the two asks for details
        return bool(parameters.details or parameters.decoder_input_details)
    return bool(profile.tgi_compat if parameters.details is None else parameters.details)


def _wants_logprobs(
    parameters: GenerationParameters,
    profile: ServingProfile,
    candidates: Candidates,
    *,
    is_streaming: bool,
) -> bool:
    """Whether rows carry log probabilities: streamed rows and detail tokens do unless told not to.

    TGI's clients need them always.
    """
    if profile.tgi_compat:
        return True
    if parameters.logprobs is False:
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
    return bool(stream) or profile.output_formatter in ("jsonlines", "sse")


def _check_stream(request: LmiRequest) -> None:
    if not request.is_streaming:
        return
    if request.is_list:
        raise PayloadError("inputs: streaming takes one prompt, not a list")
    if request.candidates.generated > 1:
        raise PayloadError("parameters: n, best_of and num_beams above 1 cannot be streamed")
    if request.decoder_input_details:
        raise PayloadError("parameters.decoder_input_details: not available when streaming")


def _prompts(inputs: object) -> tuple[tuple[str, ...], bool]:
    if isinstance(inputs, str):
        prompts, is_list = (inputs,), False
    elif isinstance(inputs, list) and all(isinstance(item, str) for item in inputs):
        prompts, is_list = tuple(inputs), True
    else:
        raise PayloadError("inputs: expected text or a list of texts")
    if not prompts or "" in prompts:
        raise PayloadError("inputs: an empty prompt is not allowed")
    return prompts, is_list
