"""Bytes and headers to a typed request: content types, dispatch, LMI requests (http-api.md 3-5)."""

import csv
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import BytesParser
from email.policy import HTTP
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.parameters import (
    MAX_LOGPROBS,
    GenerationParameters,
    is_sampling,
    parse_parameters,
    sampling_fields,
    unknown_names,
)
from lmi_vllm.messages import ServingProfile

logger = logging.getLogger(__name__)

URL_ENCODED: Final = "application/x-www-form-urlencoded"
MULTIPART: Final = "multipart/form-data"
CSV_COLUMNS: Final = ("inputs", "question", "context")
EXAMPLE_BODY: Final = '{"inputs": "text", "parameters": {"max_new_tokens": 30}}'


class Family(StrEnum):
    """What a payload asks for; the first that matches wins."""

    GENERATION = "generation"
    COMPLETION = "completions"
    CHAT = "chat/completions"


@dataclass(frozen=True, slots=True)
class LmiRequest:
    """One LMI generation request, validated.

    `candidates` sequences are generated per prompt and the `returned` best of them answered.
    """

    prompts: tuple[str, ...]
    is_list: bool
    is_streaming: bool
    sampling: Mapping[str, object]
    apply_model_defaults: bool
    candidates: int
    returned: int
    truncate: int | None
    priority: int
    seed: int | None
    details: bool
    decoder_input_details: bool
    return_full_text: bool
    top_n_tokens: int
    wants_logprobs: bool


def decode_body(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the payload object of a request body (http-api.md 3, content types).

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


def parse_lmi_request(payload: Mapping[str, Any], profile: ServingProfile) -> LmiRequest:
    """Return the typed request of an `inputs` payload.

    Raises:
        PayloadError: names the field and what is allowed.
    """
    prompts, is_list = _prompts(payload["inputs"])
    raw = payload.get("parameters")
    if raw is not None and not isinstance(raw, dict):
        raise PayloadError("parameters: expected an object")
    parameters = parse_parameters(raw or {})
    for name in unknown_names(parameters):
        logger.warning("request parameter %.80r has no effect", name)  # a client's text
    is_streaming = _is_streaming(payload, parameters, profile)
    candidates, returned = _candidates(parameters)
    request = LmiRequest(
        prompts=prompts,
        is_list=is_list,
        is_streaming=is_streaming,
        sampling=_sampling(parameters, profile, candidates, is_streaming=is_streaming),
        apply_model_defaults=is_sampling(parameters),
        candidates=candidates,
        returned=returned,
        truncate=parameters.truncate,
        priority=parameters.priority or 0,
        seed=parameters.seed,
        details=bool(profile.tgi_compat if parameters.details is None else parameters.details),
        decoder_input_details=bool(parameters.decoder_input_details),
        return_full_text=bool(parameters.return_full_text),
        top_n_tokens=parameters.top_n_tokens or 0,
        wants_logprobs=_wants_logprobs(parameters, profile, is_streaming=is_streaming),
    )
    _check_stream(request)
    return request


def _sampling(
    parameters: GenerationParameters,
    profile: ServingProfile,
    candidates: int,
    *,
    is_streaming: bool,
) -> dict[str, Any]:
    fields = sampling_fields(parameters)
    if profile.tgi_compat:  # TGI keeps a stop sequence in the text
        fields.setdefault("include_stop_str_in_output", True)
    if candidates > 1:
        fields["n"] = candidates
    count = parameters.top_n_tokens or _requested_logprobs(parameters)
    wants = _wants_logprobs(parameters, profile, is_streaming=is_streaming)
    if count or wants or candidates > 1:
        fields["logprobs"] = count
    if parameters.decoder_input_details and parameters.details:
        fields["prompt_logprobs"] = 1
    return fields


def _requested_logprobs(parameters: GenerationParameters) -> int:
    wanted = parameters.logprobs
    if wanted is None or isinstance(wanted, bool):
        return 0
    if not 0 <= wanted <= MAX_LOGPROBS:
        raise PayloadError(f"parameters.logprobs: expected 0 to {MAX_LOGPROBS} (got {wanted})")
    return wanted


def _wants_logprobs(
    parameters: GenerationParameters, profile: ServingProfile, *, is_streaming: bool
) -> bool:
    """Whether rows carry log probabilities: streamed rows and detail tokens do unless told not to.

    TGI's clients need them always.
    """
    if profile.tgi_compat:
        return True
    if not is_streaming:
        return bool(parameters.details)
    return parameters.logprobs is not False and profile.stream_logprobs


def _candidates(parameters: GenerationParameters) -> tuple[int, int]:
    if (parameters.num_beams or 1) > 1:
        raise PayloadError(
            "parameters.num_beams: beam search is not available yet; use best_of with do_sample, "
            "or use_beam_search on /v1/completions"
        )
    candidates = max(parameters.best_of or 1, parameters.n or 1)
    if candidates > 1 and not is_sampling(parameters):
        raise PayloadError(
            "parameters: more than one candidate (n, best_of) needs do_sample=true or a "
            "temperature above 0"
        )
    return candidates, parameters.n or candidates


def _is_streaming(
    payload: Mapping[str, Any], parameters: GenerationParameters, profile: ServingProfile
) -> bool:
    stream = payload.get("stream")
    stream = parameters.stream if stream is None else stream
    if stream is None:
        return profile.output_formatter in ("jsonlines", "sse")
    if not isinstance(stream, bool):
        raise PayloadError("stream: expected true or false")
    return stream or profile.output_formatter in ("jsonlines", "sse")


def _check_stream(request: LmiRequest) -> None:
    if not request.is_streaming:
        return
    if request.is_list:
        raise PayloadError("inputs: streaming takes one prompt, not a list")
    if request.candidates > 1:
        raise PayloadError("parameters: n and best_of above 1 cannot be streamed")
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
