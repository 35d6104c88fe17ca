"""The `parameters` of an LMI generation request, and how much any request may ask for.

Pydantic lives here and in the settings sources only: a request's parameters are validated once,
then turned into frozen types.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeGuard

import orjson
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
from lmi_vllm.messages import RequestLimits

logger = logging.getLogger(__name__)

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
Strings = Annotated[list[str], BeforeValidator(_strings, json_schema_input_type=list[str] | str)]


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
    seed: Annotated[int, BeforeValidator(_seed, json_schema_input_type=int | str)] | None = Field(
        None, ge=-INT64_MAX - 1, le=INT64_MAX
    )
    stop_sequences: Strings | None = None
    stop: Strings | None = None
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
    n: Whole | None = Field(None, ge=1)
    best_of: Whole | None = Field(None, ge=1)
    num_beams: Whole | None = Field(None, ge=1)
    top_n_tokens: Whole | None = Field(None, ge=0)
    logprobs: StrictBool | Whole | None = None
    prompt_logprobs: Whole | None = Field(None, ge=0)
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
    length_penalty: Number | None = Field(None, ge=-10.0, le=10.0)
    # Accepted, without effect: LMI documents them, vLLM has nothing like them.
    typical_p: Any = None
    watermark: Any = None
    early_stopping: Any = None
    cached_prompt: Any = None
    adapters: Any = None
    adapter_id: str | None = None


WITHOUT_EFFECT: Final = (
    "typical_p",
    "watermark",
    "early_stopping",
    "cached_prompt",
    "adapters",  # it belongs beside `parameters`
)
MOST_MESSAGES: Final = 8192  # each is checked, and put into the template, one by one
# Compared after each token, in the engine; the time may grow with the square.
LONGEST_PATTERN: Final = 128
_SEQUENCES: Final = ("n", "best_of", "num_beams")
_STRINGS: Final = ("stop", "stop_sequences", "bad_words")
_TOKEN_IDS: Final = ("logit_bias", "stop_token_ids", "allowed_token_ids")
_LOGPROBS: Final = ("logprobs", "top_n_tokens", "prompt_logprobs")
_GRAMMARS: Final = (
    "structured_outputs",
    "response_format",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
# Fields of an OpenAI body that may hold one text or many, each of which is work of its own.
_TEXTS: Final = (
    "prompt",
    "input",
    "documents",
    "text_1",
    "text_2",
    "queries",
    "items",
    "data_1",
    "data_2",
)


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


def unread_names(parameters: GenerationParameters) -> Sequence[str]:
    """Return the names without effect, for one warning each."""
    extra = parameters.model_extra or {}
    ignored = [name for name in WITHOUT_EFFECT if getattr(parameters, name) is not None]
    if parameters.length_penalty is not None and (parameters.num_beams or 1) == 1:
        ignored.append("length_penalty")
    return [*extra, *ignored]


@dataclass(slots=True)
class UnreadNames:
    """Warns of each parameter name without effect, once; a client may invent any number of them."""

    most: int = 1000
    _seen: set[str] = field(default_factory=set)

    def warn(self, names: Iterable[str]) -> None:
        """Log one warning for each name that is new."""
        for name in names:
            if len(self._seen) >= self.most or name in self._seen:
                continue
            self._seen.add(name)
            logger.warning("request parameter %.80r has no effect", name)  # a client's text
            if len(self._seen) == self.most:
                logger.warning("no further request parameters without effect are named")


def check_limits(given: Mapping[str, Any], limits: RequestLimits, prefix: str = "") -> None:
    """Return when no field of `given` asks for too much; wrong types are for others to refuse.

    Raises:
        PayloadError: names the field, the bound and the setting that moves it.
    """
    for problem in _excesses(given, limits):
        raise PayloadError(prefix + problem)


def check_logprobs(given: Mapping[str, Any], limits: RequestLimits) -> None:
    """Return when LMI parameters ask for no more log probabilities than the engine gives.

    Raises:
        PayloadError: names the parameter and the bound.
    """
    most = limits.max_logprobs if limits.max_logprobs >= 0 else sys.maxsize
    for name in _LOGPROBS:
        count = given.get(name)
        if _is_number(count) and not 0 <= count <= most:
            raise PayloadError(f"parameters.{name}: expected 0 to {most} (got {count})")
    width = given.get("num_beams")
    if _is_number(width) and width > max(most // 2, 1):
        # Each step of a beam search looks at the 2 * width most probable tokens.
        raise PayloadError(
            f"parameters.num_beams: at most {most // 2}, half of max_logprobs (got {width})"
        )


def sequence_count(body: Mapping[str, Any]) -> int:
    """Return how many sequences an OpenAI body asks for: its prompts times `n`; one counts as 1.

    A prompt may be text or a list of token ids; a list of either is several.
    """
    prompts = max(_length(body.get(name)) for name in _TEXTS)
    wanted = _as_number(body.get("n"))
    return prompts * max(int(wanted), 1) if prompts > 1 and wanted else prompts


def _length(value: object) -> int:
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return 1
    return len(value)


def _excesses(given: Mapping[str, Any], limits: RequestLimits) -> Iterator[str]:
    for name in _SEQUENCES:
        count = _as_number(given.get(name))
        if count is not None and count > limits.max_sequences:
            yield f"{name}: at most {limits.max_sequences} (LMI_MAX_SEQUENCES) (got {count})"
    for name in _STRINGS:
        yield from _long_strings(name, given.get(name), limits)
    for name in _TOKEN_IDS:
        value = given.get(name)
        if isinstance(value, (list, dict)) and len(value) > limits.max_logit_bias:
            most = f"{limits.max_logit_bias} entries (LMI_MAX_LOGIT_BIAS)"
            yield f"{name}: at most {most} (got {len(value)})"
    yield from _long_lists(given, limits)
    for name, value in _grammars(given):
        if (size := _size(value)) > limits.max_grammar_size:
            most = f"{limits.max_grammar_size} bytes (LMI_MAX_GRAMMAR_SIZE)"
            yield f"{name}: at most {most} (got {size})"


def _long_lists(given: Mapping[str, Any], limits: RequestLimits) -> Iterator[str]:
    """What vLLM goes through on a thread that others need, and has no bound of its own for."""
    messages = given.get("messages")
    if isinstance(messages, list) and len(messages) > MOST_MESSAGES:
        yield f"messages: at most {MOST_MESSAGES} (got {len(messages)})"
    tokens = given.get("tokens")  # of /detokenize; vLLM would look at each of them first
    if isinstance(tokens, list) and len(tokens) > limits.max_tokenize_length:
        most = f"{limits.max_tokenize_length} (LMI_MAX_TOKENIZE_LENGTH)"
        yield f"tokens: at most {most} (got {len(tokens)})"
    repetition = given.get("repetition_detection")
    given_length = repetition.get("max_pattern_size") if isinstance(repetition, dict) else None
    longest = _as_number(given_length)
    if longest is not None and longest > LONGEST_PATTERN:
        name = "repetition_detection.max_pattern_size"
        yield f"{name}: at most {LONGEST_PATTERN} tokens (got {longest})"


def _as_number(value: object) -> float | None:
    """Return a number, or what vLLM's models make of a text; None for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return min(sys.maxsize, float(value))  # which a NaN is, too
    return value if _is_number(value) else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _long_strings(name: str, value: object, limits: RequestLimits) -> Iterator[str]:
    texts: Sequence[object] = value if isinstance(value, list) else [value]
    if len(texts) > limits.max_stop_strings:
        most = f"{limits.max_stop_strings} (LMI_MAX_STOP_STRINGS)"
        yield f"{name}: at most {most} (got {len(texts)})"
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > limits.max_stop_length:
        most = f"{limits.max_stop_length} characters each (LMI_MAX_STOP_LENGTH)"
        yield f"{name}: at most {most} (got {longest})"


def _grammars(given: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what a grammar is made of, tools' parameters and the responses route's included."""
    for name in _GRAMMARS:
        yield name, given.get(name)
    text = given.get("text")
    if isinstance(text, dict):
        yield "text.format", text.get("format")
    tools = given.get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            yield f"tools[{position}]", tool


def _size(value: object) -> int:
    """Return the bytes of a grammar as it came: a text, or JSON."""
    if value is None:
        return 0
    return len(value.encode() if isinstance(value, str) else orjson.dumps(value))
