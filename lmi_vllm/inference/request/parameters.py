"""The `parameters` of an LMI generation request.

Only this module and the settings sources use pydantic: a request's parameters are validated once,
then turned into frozen types.
"""

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Generic, TypeVar

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

logger = logging.getLogger(__name__)

INT32_MAX: Final = (1 << 31) - 1
INT64_MAX: Final = (1 << 63) - 1  # limits of the engine's messages and torch's seeds


def _whole(value: object) -> object:
    """Accept 30.0 and "30" as 30: some writers have no integers, some no numbers."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        raise ValueError("expected a whole number, not true or false")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(value: object) -> object:
    """Accept "0.5" as 0.5, as LMI and vLLM do; true is not a number."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("expected a number") from None


def _strings(value: object) -> object:
    return [value] if isinstance(value, str) else value


# Texts of numbers are taken, too; the description of the API has the bounds of a number.
Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=INT32_MAX)]
Number = Annotated[float, BeforeValidator(_number)]
Strings = Annotated[list[str], BeforeValidator(_strings, json_schema_input_type=list[str] | str)]


class GenerationParameters(BaseModel):
    """Every known parameter; unknown names are kept apart, for a warning."""

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
    seed: Whole | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
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
    # Accepted without effect: LMI documents them, and vLLM has no equivalent.
    typical_p: Any = None
    watermark: Any = None
    early_stopping: Any = None
    cached_prompt: Any = None
    # The adapter, where `adapters` beside them does not name it.
    adapters: Any = None
    adapter_id: str | None = None

    def given(self) -> dict[str, Any]:
        """Return the parameters of the request, by our names; null counts as missing.

        A request has a few of fifty parameters, so the cost must not grow with the others.
        """
        given, values = dict(self.model_extra or {}), self.__dict__
        for name in self.model_fields_set & values.keys():
            given[name] = values[name]
        for name in [*given]:
            if given[name] is None:
                del given[name]
        return given


WITHOUT_EFFECT: Final = (
    "typical_p",
    "watermark",
    "early_stopping",
    "cached_prompt",
)


# One parameter each: the first name counts. `max_new_tokens` and `max_tokens` are two fields.
_TWO_NAMES: Final = (("min_new_tokens", "min_tokens"), ("ignore_eos_token", "ignore_eos"))


def parse_parameters(raw: Mapping[str, Any]) -> GenerationParameters:
    """Return the validated parameters.

    Raises:
        PayloadError: names each parameter at fault and what is allowed.
    """
    values = dict(raw)
    for name, other in _TWO_NAMES:
        if name not in values or other not in values:
            continue
        if values[name] is None:  # null counts as missing
            del values[name]
        elif (unread := values.pop(other)) not in (None, values[name]):
            values[f"{other} beside {name}"] = unread
    try:
        return GenerationParameters.model_validate(values)
    except ValidationError as error:
        raise PayloadError("; ".join(_problems(error))) from None


def _problems(error: ValidationError) -> list[str]:
    # A union reports each of its branches; one sentence per parameter is enough.
    seen: dict[str, str] = {}
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else "parameters"
        message = item["msg"].removeprefix("Value error, ")
        seen.setdefault(name, f"parameters.{name}: {message} (got {_shown(item['input'])})")
    return list(seen.values())


def _shown(value: object) -> str:
    """Return a short JSON text of a value; a container, which may be deep, is only named."""
    if isinstance(value, (list, dict)):
        return "an array" if isinstance(value, list) else "an object"
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


def unread_names(parameters: GenerationParameters) -> Sequence[str]:
    """Return the names without effect, for one warning each."""
    ignored = []
    for name in WITHOUT_EFFECT:
        if getattr(parameters, name) is not None:
            ignored.append(name)
    if parameters.max_tokens not in (None, parameters.max_new_tokens or parameters.max_tokens):
        ignored.append("max_tokens beside max_new_tokens")
    if parameters.length_penalty is not None and (parameters.num_beams or 1) == 1:
        ignored.append("length_penalty")
    return [*(parameters.model_extra or {}), *ignored]


_PLAIN: Final = frozenset({bool, int, float, type(None), str})
Key = tuple[object, ...]
Made = TypeVar("Made")


def plain_key(raw: Mapping[str, object]) -> Key | None:
    """Return names and values as a key; None if a value is more than a number or a text.

    It has the types, too: 1, 1.0 and true are equal, and mean different things.
    """
    types = tuple(map(type, raw.values()))
    return (*raw, *raw.values(), *types) if _PLAIN.issuperset(types) else None


class Repeated(Generic[Made]):
    """Keeps what was made of parameters, by `plain_key` and more: most clients repeat theirs."""

    most = 256
    longest = 1000  # characters of all names and texts: clients choose them

    def __init__(self) -> None:
        self._made: dict[Key, Made] = {}

    def find(self, key: Key) -> Made | None:
        """Return what was made of the same."""
        return self._made.get(key)

    def keep(self, key: Key, made: Made) -> None:
        """Keep it, unless the key is long."""
        if sum(len(part) for part in key if isinstance(part, str)) > self.longest:
            return
        if len(self._made) >= self.most:
            self._made.clear()
        self._made[key] = made


@dataclass(slots=True)
class UnreadNames:
    """Warns once of each parameter name without effect; clients may invent any number of names."""

    most: int = 1000
    _seen: set[str] = field(default_factory=set)

    def warn(self, names: Iterable[str], kind: str = "parameter") -> None:
        """Log one warning for each name that is new."""
        for name in names:
            if len(self._seen) >= self.most or (key := f"{kind} {name:.80}") in self._seen:
                continue
            self._seen.add(key)
            logger.warning("request %s %.80r has no effect", kind, name)  # a client's text
            if len(self._seen) == self.most:
                logger.warning("no further request parameters without effect are named")
