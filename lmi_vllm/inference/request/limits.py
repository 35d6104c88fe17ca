"""Bounds on what one request may ask for; most are checked before vLLM reads the request."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.body import MAX_DEPTH
from lmi_vllm.messages import RequestLimits

MAX_MESSAGES: Final = 8192  # and parts: each is checked, and put into the template, one by one
MAX_ITEMS: Final = 2048  # of `input` of /v1/responses: 70 us each in vLLM's models, read twice
MAX_TOOLS: Final = 1024  # 50 us each in vLLM's models, on the event loop
MAX_TOOLS_SIZE: Final = 1 << 20  # bytes of all tools: vLLM's models and templates read each value
# Of a field beside token ids: vLLM's models write errors for each wrong one.
MAX_FIELD_VALUES: Final = 1 << 15
MAX_TOOLS_VALUES: Final = 1 << 17  # of all tools
MAX_FIELDS: Final = 1024  # of an object that has these fields
# Compared after each token, in the engine; the time may grow with the square.
LONGEST_PATTERN: Final = 128
LONGEST_ID: Final = 8190  # characters, as in a header: it is in each row of a stream
_SEQUENCES: Final = ("n", "best_of", "num_beams")
_STRINGS: Final = ("stop", "stop_sequences", "bad_words")
_IDS: Final = ("request_id", "session_id")
_TOKEN_IDS: Final = ("logit_bias", "stop_token_ids", "allowed_token_ids")
# Arguments of a template's call with which it makes token ids, or pads them to any length.
_TOKENIZING: Final = ("tokenize", "padding", "max_length", "tokenizer_kwargs")
_LOGPROBS: Final = ("logprobs", "top_n_tokens", "prompt_logprobs")
_NESTING: Final = frozenset({dict, list})
_CONVERSATIONS: Final = ("messages", "system")
# Texts and token ids, which are cheap, or objects with parts, such as messages.
_MIXED: Final = (
    "input", "inputs", "documents", "queries", "items", "text_1", "text_2", "data_1", "data_2"
)  # fmt: skip
# Lists in which vLLM's models take no number: each is an error of 20 us.
_NO_TOKEN_IDS: Final = frozenset({"documents", "include", "messages", "tools", "metadata"})
_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GRAMMARS: Final = (
    "structured_outputs", "response_format", "grammar",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
# The fields that `check_limits` reads: most requests have none of them.
_BOUNDED: Final = frozenset(
    {*_SEQUENCES, *_STRINGS, *_IDS, *_TOKEN_IDS, *_GRAMMARS, *_CONVERSATIONS, *_MIXED,
     "tokens", "repetition_detection", "text", "tools", "chat_template_kwargs"}
)  # fmt: skip
# Fields of an OpenAI body with one text or several; each text is work of its own.
_TEXTS: Final = frozenset(
    {*_MIXED, "prompt", "texts", "images"}
)  # fmt: skip


def check_limits(given: Mapping[str, Any], limits: RequestLimits, prefix: str = "") -> None:
    """Check that no field of `given` asks for too much; wrong types are refused elsewhere.

    Raises:
        PayloadError: names the field, the bound and the setting that moves it.
    """
    if len(given) > MAX_FIELDS:
        raise PayloadError(f"{prefix or 'the body'}: at most {MAX_FIELDS} fields")
    for name, value in given.items():
        if type(value) in _NESTING and (problem := _excess_of_values(name, value)):
            raise PayloadError(f"{prefix}{name}: {problem}")
    if _BOUNDED.isdisjoint(given):
        return
    for problem in _excesses(given, limits):
        raise PayloadError(prefix + problem)


def check_logprobs(given: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check that LMI parameters ask for no more log probabilities than the engine gives.

    Raises:
        PayloadError: names the parameter and the bound.
    """
    most = limits.max_logprobs if limits.max_logprobs >= 0 else sys.maxsize
    for name in _LOGPROBS:
        count = given.get(name)
        if count is not None and _is_number(count) and not 0 <= count <= most:
            raise PayloadError(f"parameters.{name}: expected 0 to {most} (got {count})")
    if (width := given.get("num_beams")) and _is_number(width) and width > max(most // 2, 1):
        # Each step of a beam search looks at the 2 * width most probable tokens.
        raise PayloadError(
            f"parameters.num_beams: at most {most // 2}, half of max_logprobs (got {width})"
        )


def sequence_count(body: Mapping[str, Any]) -> int:
    """Return the number of sequences of an OpenAI body: its prompts times `n`; one prompt is 1.

    A prompt may be a text or a list of token ids; a list of either is several prompts.
    """
    prompts = 1
    for name in _TEXTS & body.keys():
        value = body[name]
        if isinstance(value, list) and value and not isinstance(value[0], int):
            prompts = max(prompts, len(value))
    messages = body.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[0], list):
        prompts = max(prompts, len(messages))  # /v1/chat/completions/batch: conversations
    wanted = _as_number(body.get("n")) if prompts > 1 else None
    return prompts * max(int(wanted), 1) if wanted else prompts


def _excesses(given: Mapping[str, Any], limits: RequestLimits) -> Iterator[str]:
    for name in filter(given.__contains__, _SEQUENCES):  # most bodies have few of these fields
        count = _as_number(given[name])
        if count is not None and count > limits.max_sequences:
            yield f"{name}: at most {limits.max_sequences} (LMI_MAX_SEQUENCES) (got {count})"
    for name in filter(given.__contains__, _STRINGS):
        yield from _long_strings(name, given[name], limits)
    for name in filter(given.__contains__, _TOKEN_IDS):
        value = given[name]
        if isinstance(value, (list, dict)) and len(value) > limits.max_logit_bias:
            most = f"{limits.max_logit_bias} entries (LMI_MAX_LOGIT_BIAS)"
            yield f"{name}: at most {most} (got {len(value)})"
    for name in filter(given.__contains__, _IDS):
        if isinstance(value := given[name], str) and len(value) > LONGEST_ID:
            yield f"{name}: at most {LONGEST_ID} characters (got {len(value)})"
    yield from _tokenizing(given.get("chat_template_kwargs"))
    yield from _long_lists(given, limits)
    yield from _large_grammars(given, limits)


def _tokenizing(template: object) -> Iterator[str]:
    if isinstance(template, dict):
        for name in filter(template.get, _TOKENIZING):
            yield f"chat_template_kwargs.{name}: not allowed; a chat's text is tokenized without it"


def _large_grammars(given: Mapping[str, Any], limits: RequestLimits) -> Iterator[str]:
    if not isinstance(given.get("structured_outputs"), dict | None):  # vLLM's models fail on it
        yield f"structured_outputs: expected an object with one of {', '.join(_CONSTRAINTS)}"
    tools = 0
    for name, value in _grammars(given):
        if (size := _size(value)) > limits.max_grammar_size:
            most = f"{limits.max_grammar_size} bytes (LMI_MAX_GRAMMAR_SIZE)"
            yield f"{name}: at most {most} (got {size})"
        tools += size if name.startswith("tools[") else 0
    if tools > MAX_TOOLS_SIZE:
        yield f"tools: at most {MAX_TOOLS_SIZE} bytes together (got {tools})"


def _long_lists(given: Mapping[str, Any], limits: RequestLimits) -> Iterator[str]:
    """Yield lists that vLLM processes on a shared thread without a bound of its own."""
    for name in filter(given.__contains__, (*_CONVERSATIONS, *_MIXED)):
        value = given[name]
        if name in _MIXED and isinstance(value, list):
            value = [one for one in value if isinstance(one, dict)]
        limit = MAX_ITEMS if name == "input" else MAX_MESSAGES
        if (count := _message_count(value)) > limit:
            yield f"{name}: at most {limit} messages and parts of them (got {count})"
    tools = given.get("tools")
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        yield f"tools: at most {MAX_TOOLS} (got {len(tools)})"
    tokens = given.get("tokens")  # of /detokenize; vLLM would examine each of them first
    if isinstance(tokens, list) and len(tokens) > limits.max_tokenize_length:
        most = f"{limits.max_tokenize_length} (LMI_MAX_TOKENIZE_LENGTH)"
        yield f"tokens: at most {most} (got {len(tokens)})"
    repetition = given.get("repetition_detection")
    given_length = repetition.get("max_pattern_size") if isinstance(repetition, dict) else None
    longest = _as_number(given_length)
    if longest is not None and longest > LONGEST_PATTERN:
        name = "repetition_detection.max_pattern_size"
        yield f"{name}: at most {LONGEST_PATTERN} tokens (got {longest})"


def _message_count(value: object) -> int:
    """Return the number of messages and parts, also in conversations and results.

    Every list in a message counts as parts, because vLLM's models read each of its items.
    """
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left += [part for part in one.values() if isinstance(part, list)]
        elif isinstance(one, list):
            count += len(one)
            left += one
    return count


def _excess_of_values(name: str, value: Any) -> str:
    """Return what it has too much of for vLLM's models, parsers and templates: levels or values."""
    most = MAX_TOOLS_VALUES if name == "tools" else MAX_FIELD_VALUES
    level, left, has_ids = [value], most, name not in _NO_TOKEN_IDS
    with contextlib.suppress(RecursionError):  # of arguments
        for _ in range(MAX_DEPTH):
            others = (
                each for each in level
                if not has_ids or {*map(type, each)} != {int} or min(each) < 0
            )  # fmt: skip
            left -= sum(map(len, others))
            if left < 0:
                return f"at most {most} values beside token ids"
            level = [one for each in level for one in _held(each) if type(one) in _NESTING]
            if not level:
                return ""
    levels = f"{MAX_DEPTH} levels, those in the arguments of tool calls, too"
    return f"objects and lists may nest at most {levels}"


def _held(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    """Return the values in an object or a list; a call's arguments are a text that vLLM parses."""
    if isinstance(value, list):
        return value
    text = value.get("arguments")
    if isinstance(text, str) and text.count("{") + text.count("[") > MAX_DEPTH // 2:
        with contextlib.suppress(ValueError):  # vLLM refuses or ignores a text that is no JSON
            return [*value.values(), json.loads(text)]
    return value.values()


def _as_number(value: object) -> float | None:
    """Return a number, or a text that vLLM's models read as one; None for anything else."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return min(sys.maxsize, float(value))  # NaN, too
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
    """Yield the grammars of a request, with tools' parameters and the responses route's format."""
    for name in filter(given.__contains__, _GRAMMARS):
        yield name, given[name]
    text = given.get("text")
    if isinstance(text, dict):
        yield "text.format", text.get("format")
    tools = given.get("tools")
    for position, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict):
            yield f"tools[{position}]", tool


def _size(value: object) -> int:
    """Return the size in bytes of a grammar: a text, or JSON."""
    if value is None:
        return 0
    try:
        return len(value.encode() if isinstance(value, str) else orjson.dumps(value))
    except (TypeError, UnicodeEncodeError):  # half of a surrogate pair, which vLLM refuses
        return len(json.dumps(value))
