"""The `parameters` of an LMI generation request and what they mean to vLLM (http-api.md 5).

Pydantic lives here and in the settings sources only: a request's parameters are validated once,
then turned into frozen types.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
)

from lmi_vllm.errors import PayloadError

DEFAULT_MAX_NEW_TOKENS: Final = 30
MAX_LOGPROBS: Final = 20  # vLLM's own default bound
MAX_CANDIDATES: Final = 16
MAX_STOP_STRINGS: Final = 64
INT32_MAX: Final = (1 << 31) - 1
INT64_MAX: Final = (1 << 63) - 1  # what the engine's messages and torch's seeds can hold


def _whole(value: object) -> object:
    """Let 30.0 pass for 30, as JSON writers without integers send it; true is not a number."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number, not true or false")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        raise ValueError("expected a number, not text")
    return value


def _number(value: object) -> object:
    if isinstance(value, (bool, str)):
        raise ValueError("expected a number")
    return value


def _seed(value: object) -> object:
    """A seed may also be a numeric string (documented)."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise ValueError("expected a whole number or its text") from None
    return _whole(value)


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=INT32_MAX)]
Number = Annotated[float, BeforeValidator(_number)]
Strings = Annotated[list[str], BeforeValidator(_strings)]


class GenerationParameters(BaseModel):
    """Every parameter we know; unknown names are kept aside and named in a warning."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    max_new_tokens: Whole | None = Field(None, ge=1)
    max_tokens: Whole | None = Field(None, ge=1)
    min_new_tokens: Whole | None = Field(
        None, ge=0, validation_alias=AliasChoices("min_new_tokens", "min_tokens")
    )
    do_sample: StrictBool | None = None
    temperature: Number | None = Field(None, ge=0.0)
    top_k: Whole | None = Field(None, ge=-1, le=INT32_MAX)
    top_p: Number | None = Field(None, gt=0.0, le=1.0)
    min_p: Number | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: Number | None = Field(None, gt=0.0, le=2.0)
    presence_penalty: Number | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: Number | None = Field(None, ge=-2.0, le=2.0)
    seed: Annotated[int, BeforeValidator(_seed)] | None = Field(
        None, ge=-INT64_MAX - 1, le=INT64_MAX
    )
    stop_sequences: Strings | None = Field(None, max_length=MAX_STOP_STRINGS)
    stop: Strings | None = Field(None, max_length=MAX_STOP_STRINGS)
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    ignore_eos_token: StrictBool | None = Field(
        None, validation_alias=AliasChoices("ignore_eos_token", "ignore_eos")
    )
    return_full_text: StrictBool | None = None
    details: StrictBool | None = None
    decoder_input_details: StrictBool | None = None
    truncate: Whole | None = Field(None, ge=1, le=INT32_MAX)
    n: Whole | None = Field(None, ge=1, le=MAX_CANDIDATES)
    best_of: Whole | None = Field(None, ge=1, le=MAX_CANDIDATES)
    num_beams: Whole | None = Field(None, ge=1)
    top_n_tokens: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logprobs: StrictBool | Whole | None = None
    prompt_logprobs: Whole | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: StrictBool | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    priority: Whole | None = Field(None, ge=-INT32_MAX, le=INT32_MAX)
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: dict[str, Any] | None = None
    # Accepted, without effect: table of http-api.md 5.
    typical_p: Any = None
    watermark: Any = None
    early_stopping: Any = None
    cached_prompt: Any = None
    length_penalty: Any = None
    adapters: Any = None
    adapter_id: str | None = None


WITHOUT_EFFECT: Final = ("typical_p", "watermark", "early_stopping", "cached_prompt")
_SAMPLING_HINTS: Final = ("temperature", "top_p", "top_k", "min_p")
# Ours -> vLLM's SamplingParams; only what the request gives is passed on.
_SAME_MEANING: Final[Mapping[str, str]] = {
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop_token_ids": "stop_token_ids",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "ignore_eos_token": "ignore_eos",
    "bad_words": "bad_words",
    "allowed_token_ids": "allowed_token_ids",
    "prompt_logprobs": "prompt_logprobs",
}


def parse_parameters(raw: Mapping[str, Any]) -> GenerationParameters:
    """Return the validated parameters.

    Raises:
        PayloadError: names each parameter at fault and what is allowed.
    """
    try:
        return GenerationParameters.model_validate(dict(raw))
    except ValidationError as error:
        raise PayloadError("; ".join(_problems(error))) from None


def _problems(error: ValidationError) -> list[str]:
    # A union reports each branch; one sentence per parameter is enough.
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else "parameters"
        message = item["msg"].removeprefix("Value error, ")
        seen.setdefault(name, f"parameters.{name}: {message} (got {_shown(item['input'])})")
    return list(seen.values())


def _shown(value: object) -> str:
    """Return a short JSON text of what came in; containers may be deep, and say what they are."""
    if isinstance(value, (list, dict)):
        return "an array" if isinstance(value, list) else "an object"
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


def unknown_names(parameters: GenerationParameters) -> Iterable[str]:
    """Return the names that nobody will read, for one warning each."""
    extra = parameters.model_extra or {}
    ignored = [name for name in WITHOUT_EFFECT if getattr(parameters, name) is not None]
    return [*extra, *ignored]


def is_sampling(parameters: GenerationParameters) -> bool:
    """Whether to sample: asked for, or implied by a sampling value; else greedy as documented."""
    if parameters.do_sample is not None:
        return parameters.do_sample and parameters.temperature != 0
    if parameters.temperature == 0:
        return False
    return any(getattr(parameters, name) is not None for name in _SAMPLING_HINTS)


def sampling_fields(parameters: GenerationParameters) -> dict[str, Any]:
    """Return the vLLM SamplingParams fields that the parameters ask for."""
    fields: dict[str, Any] = {
        target: value
        for name, target in _SAME_MEANING.items()
        if (value := getattr(parameters, name)) is not None
    }
    if not is_sampling(parameters):
        fields["temperature"] = 0.0
    if fields.get("top_k") == -1:
        fields["top_k"] = 0  # both mean off
    wanted = parameters.max_new_tokens or parameters.max_tokens or DEFAULT_MAX_NEW_TOKENS
    if (least := parameters.min_new_tokens or 0) > wanted:
        raise PayloadError(
            f"parameters.min_new_tokens: {least} is more than max_new_tokens ({wanted})"
        )
    fields["max_tokens"] = wanted
    stop = list(dict.fromkeys([*(parameters.stop_sequences or ()), *(parameters.stop or ())]))
    if stop:
        if "" in stop:
            raise PayloadError("parameters.stop_sequences: an empty stop string is not allowed")
        fields["stop"] = stop
    if parameters.logit_bias is not None:
        fields["logit_bias"] = _logit_bias(parameters.logit_bias)
    if (constraint := structured_outputs(parameters)) is not None:
        fields["structured_outputs"] = constraint
    return fields


def _logit_bias(raw: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in raw.items()}
    except ValueError:
        raise PayloadError("parameters.logit_bias: keys must be token ids") from None


def structured_outputs(parameters: GenerationParameters) -> dict[str, Any] | None:
    """Return vLLM's structured-output constraint from whichever spelling the request uses."""
    given = {
        "json": parameters.guided_json,
        "regex": parameters.guided_regex,
        "choice": parameters.guided_choice,
        "grammar": parameters.guided_grammar,
    }
    found: list[dict[str, Any]] = [
        {kind: value} for kind, value in given.items() if value is not None
    ]
    if parameters.structured_outputs is not None:
        found.append(parameters.structured_outputs)
    if parameters.grammar is not None:
        found.append(_tgi_grammar(parameters.grammar))
    if parameters.response_format is not None:
        found += _response_format(parameters.response_format)
    if len(found) > 1:
        raise PayloadError(
            "parameters: only one of structured_outputs, response_format, grammar and guided_* "
            "may be given"
        )
    return found[0] if found else None


def _tgi_grammar(grammar: Mapping[str, Any]) -> dict[str, Any]:
    kind = grammar.get("type")
    if kind not in ("json", "regex", "json_schema") or "value" not in grammar:
        raise PayloadError('parameters.grammar: expected {"type": "json" or "regex", "value": ...}')
    return {"regex" if kind == "regex" else "json": grammar["value"]}


def _response_format(wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = wanted.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [{"json_object": True}]
    schema = wanted.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict) and "schema" in schema:
        return [{"json": schema["schema"]}]
    raise PayloadError(
        "parameters.response_format: type must be text, json_object or json_schema (with "
        "json_schema.schema)"
    )
