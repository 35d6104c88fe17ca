"""The bytes of a body to a payload, and an `inputs` payload to a typed request."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.parameters import (
    GenerationParameters,
    check_limits,
    check_logprobs,
    parse_parameters,
    unread_names,
)
from lmi_vllm.inference.request.sampling import (
    Candidates,
    choose_candidates,
    is_sampling,
    request_sampling,
    wants_details,
)
from lmi_vllm.inference.response.formatters import streams_by_default
from lmi_vllm.messages import METERED, ServingProfile, TgiRoute

URL_ENCODED: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"
MOST_VALUES: Final = 1 << 20
CSV_COLUMNS: Final = ("inputs", "question", "context")
EXAMPLE_BODY: Final = '{"inputs": "text", "parameters": {"max_new_tokens": 30}}'


class PayloadKind(StrEnum):
    """What a payload asks for; the first that matches wins."""

    GENERATION = "generation"
    COMPLETION = "completions"
    CHAT = "chat/completions"


@dataclass(frozen=True, slots=True)
class LmiRequest:
    """One LMI generation request, validated; `unread` names what of it has no effect."""

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

    @property
    def shows_tokens(self) -> bool:
        """Whether the answer has more than the text."""
        return self.is_streaming or self.details or self.candidates.returned > 1


def check_values(body: bytes) -> None:
    """Return when a body has no more values than are read while other requests wait.

    A comma stands between two values. In a picture every 256th byte is one, in a text far fewer.

    Raises:
        PayloadError: it has more than any prompt has token ids.
    """
    if len(body) > MOST_VALUES and body.count(b",") > MOST_VALUES:
        raise PayloadError(f"the body has more than {MOST_VALUES} values")


def decode_body(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the payload object of a request body.

    Raises:
        PayloadError: the body does not parse as its content type says, or is not an object.
    """
    kind = content_type.lower()
    if "text/csv" in kind:
        return _decode_csv(_text(body))
    if "text/plain" in kind:
        return {"inputs": _text(body)}
    if URL_ENCODED in kind or MULTIPART in kind:
        return _decode_form(body, content_type)
    if kind and "json" not in kind:
        raise PayloadError(
            f"content type {content_type} cannot be used for text generation; "
            "send application/json, text/plain or text/csv"
        )
    if not body and not kind:
        return {"inputs": ""}
    return _decode_json(body)


def form_field(body: bytes, content_type: str, name: str) -> str | None:
    """Return the first field of that name in a form, None without one or where it is no form."""
    return next(
        (text for field, _, text in _form_fields(body, content_type) if field == name), None
    )


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PayloadError(f"the body is not UTF-8 text: {error}") from None


def _decode_json(body: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise PayloadError(f"the body is not valid JSON: {error}") from None
    if not isinstance(payload, dict):
        raise PayloadError(f"the body must be a JSON object; example: {EXAMPLE_BODY}")
    return payload


def _decode_form(body: bytes, content_type: str) -> dict[str, Any]:
    if body.lstrip().startswith(b"{"):  # what `curl -d` sends unless told its content type
        return _decode_json(body)
    for name, part_type, text in _form_fields(body, content_type):
        if name == "data":
            is_object = MULTIPART in content_type.lower() and text.lstrip().startswith("{")
            if is_object or "json" in part_type:
                return _decode_json(text.encode())
            return {"inputs": text}
    raise PayloadError("the form has no field data; send JSON as application/json")


def _form_fields(body: bytes, content_type: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, content type and text of each field."""
    kind = content_type.lower()
    if URL_ENCODED in kind:
        for name, value in parse_qsl(_text(body), keep_blank_values=True):
            yield name, "", value
    elif MULTIPART in kind:
        head = f"Content-Type: {content_type}\r\n\r\n".encode("utf-8", "replace")
        for part in BytesParser(policy=HTTP).parsebytes(head + body).iter_parts():
            field = part.get_param("name", "", "content-disposition")
            content = part.get_payload(decode=True)
            part_type = part.get_content_type() if "content-type" in part else ""
            yield str(field), part_type, _text(content if isinstance(content, bytes) else b"")


def _decode_csv(text: str) -> dict[str, Any]:
    try:
        rows = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise PayloadError(f"the body is not valid CSV: {error}") from None
    names = set(rows[0]) if rows else set()
    if not names & set(CSV_COLUMNS):
        raise PayloadError(
            f"text/csv needs a header row with one of {', '.join(CSV_COLUMNS)} and a row of values"
        )
    if "inputs" in names:
        return {"inputs": [row["inputs"] for row in rows]}
    return {"inputs": rows}


def dispatch(payload: Mapping[str, Any]) -> PayloadKind:
    """Return the kind of a payload.

    Raises:
        PayloadError: no key that any kind knows.
    """
    for key, kind in (
        ("prompt", PayloadKind.COMPLETION),
        ("inputs", PayloadKind.GENERATION),
        ("messages", PayloadKind.CHAT),
        ("prompt_embeds", PayloadKind.COMPLETION),
    ):
        if key in payload:
            return kind
    raise PayloadError(
        f"Invalid payload: it must contain prompt, inputs, or messages; example: {EXAMPLE_BODY}"
    )


def parse_lmi_request(
    payload: Mapping[str, Any], profile: ServingProfile, tgi_route: TgiRoute | None = None
) -> LmiRequest:
    """Return the typed request of an `inputs` payload; TGI's own routes have their defaults.

    Raises:
        PayloadError: names the field and what is allowed.
    """
    prompts, is_list = _prompts(payload, tgi_route)
    parameters = _parameters(payload)
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
    if parameters.adapter_id is not None and not profile.tgi_compat:
        names.append("adapter_id")
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
    """Whether rows carry log probabilities: streamed rows and detail tokens do unless told not to.

    TGI's clients need them always.
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
    if request.decoder_input_details and is_tgi:  # as TGI has it
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


def _parameters(payload: Mapping[str, Any]) -> GenerationParameters:
    raw = payload.get("parameters")
    if raw is not None and not isinstance(raw, dict):
        raise PayloadError("parameters: expected an object")
    return parse_parameters(raw or {})
