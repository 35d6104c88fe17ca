"""Upper bounds on the fields that multiply the work of a request."""

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.messages import RequestLimits

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
# All that `check_limits` looks at: most requests have none of it.
_BOUNDED: Final = frozenset(
    {*_SEQUENCES, *_STRINGS, *_TOKEN_IDS, *_GRAMMARS,
     "messages", "tokens", "repetition_detection", "text", "tools"}
)  # fmt: skip
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


def check_limits(given: Mapping[str, Any], limits: RequestLimits, prefix: str = "") -> None:
    """Return when no field of `given` asks for too much; wrong types are for others to refuse.

    Raises:
        PayloadError: names the field, the bound and the setting that moves it.
    """
    if _BOUNDED.isdisjoint(given):
        return
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
