"""The body of a request: its bytes become a payload, with bounds on the work it asks for."""

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard
from urllib.parse import parse_qsl

import orjson

from lmi_vllm.errors import PayloadError
from lmi_vllm.messages import RequestLimits
from lmi_vllm.multipart import KIND, MAX_PARTS, boundary_of, parts

URL_ENCODED: Final = "application/x-www-form-urlencoded"
MAX_BODY_VALUES: Final = 1 << 20
MAX_ESCAPES: Final = 1 << 18  # of `%41` in a form: decoding them is slow
CSV_COLUMNS: Final = ("inputs", "question", "context")
_ROUTE: Final = (
    "a form with a file needs the route that takes it, such as route=/v1/audio/transcriptions in "
    "X-Amzn-SageMaker-Custom-Attributes"
)
EXAMPLE_BODY: Final = '{"inputs": "text", "parameters": {"max_new_tokens": 30}}'
MAX_MESSAGES: Final = 8192  # and parts: each is checked, and put into the template, one by one
MAX_ITEMS: Final = 2048  # of `input` of /v1/responses: 70 us each in vLLM's models, read twice
MAX_TOOLS: Final = 1024  # 50 us each in vLLM's models, on the event loop
MAX_TOOLS_SIZE: Final = 1 << 20  # bytes of all tools: vLLM's models and templates read each value
MAX_DEPTH: Final = 200  # levels; orjson writes 254, Python's parsers and templates fail at 1000
# Of a field beside token ids: vLLM's models write errors for each wrong one.
MAX_FIELD_VALUES: Final = 1 << 15
MAX_TOOLS_VALUES: Final = 1 << 17  # of all tools
MAX_FIELDS: Final = 1024  # of an object that has these fields
MAX_CSV_LINES: Final = 1 << 15
MAX_CSV_COLUMNS: Final = 64
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


def check_values(body: bytes) -> None:
    """Check that a body has so few values that parsing it does not delay other requests.

    Values are separated by commas. In the bytes of a picture every 256th is a comma, in a text far
    fewer.

    Raises:
        PayloadError: it has more than any prompt has token ids.
    """
    if len(body) > MAX_BODY_VALUES and body.count(b",") > MAX_BODY_VALUES:
        raise PayloadError(f"the body has more than {MAX_BODY_VALUES} values")


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
    if URL_ENCODED in kind or KIND in kind:
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
    """Return the first field of that name in a form; None without one, or if it is no form."""
    fields = _form_fields(body, content_type)
    return next((_text(content) for field, _, content in fields if field == name), None)


def named_contents(body: bytes, content_type: str) -> Sequence[tuple[str, bytes]]:
    """Return what a handler finds under names: a form's fields and files, else the body as `data`.

    Raises:
        PayloadError: the form is cut off, or has too much.
    """
    fields = [(name, content) for name, _, content in _form_fields(body, content_type)]
    return fields or [("data", body)]


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PayloadError(f"the body is not UTF-8 text: {error}") from None


def _decode_json(body: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        if (payload := _decode_other_json(body)) is None:
            raise PayloadError(f"the body is not valid JSON: {error}") from None
    if not isinstance(payload, dict):
        raise PayloadError(f"the body must be a JSON object; example: {EXAMPLE_BODY}")
    return payload


def _decode_other_json(body: bytes) -> Any:
    """Return JSON with a byte order mark, in UTF-16 or UTF-32, as Python's parser reads it."""
    encoding = json.detect_encoding(body)
    with contextlib.suppress(UnicodeDecodeError, orjson.JSONDecodeError):
        return None if encoding == "utf-8" else orjson.loads(body.decode(encoding))
    return None


def _decode_form(body: bytes, content_type: str) -> dict[str, Any]:
    if body.lstrip().startswith(b"{"):
        return _decode_json(body)
    for name, part_type, content in _form_fields(body, content_type):
        if name == "data":
            try:
                text = content.decode()
            except UnicodeDecodeError as error:
                raise PayloadError(f"the form's field data is not UTF-8 text: {_ROUTE}") from error
            is_object = KIND in content_type.lower() and text.lstrip().startswith("{")
            if is_object or "json" in part_type:
                return _decode_json(text.encode())
            return {"inputs": text}
    of_files = f". {_ROUTE.capitalize()}" if KIND in content_type.lower() else ""
    text = f"the form has no field data; send JSON as application/json{of_files}"
    raise PayloadError(text)


def _form_fields(body: bytes, content_type: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, content type and content of each field."""
    kind = content_type.lower()
    if body.lstrip().startswith(b"{"):  # what `curl -d` sends unless it is given a content type
        return
    if URL_ENCODED in kind:
        if body.count(b"&") >= MAX_PARTS or body.count(b"%") > MAX_ESCAPES:
            raise PayloadError(
                f"the form has more than {MAX_PARTS} fields or {MAX_ESCAPES} escaped characters"
            )
        for name, value in parse_qsl(_text(body), keep_blank_values=True):
            yield name, "", value.encode()
    elif boundary := boundary_of(content_type):
        for part in parts(body, boundary):
            if part.problem:
                raise PayloadError(f"the field {part.name[:40]!r} of the form has {part.problem}")
            yield part.name, part.kind, part.content


def _decode_csv(text: str) -> dict[str, Any]:
    if text.count("\n") + text.count("\r") > MAX_CSV_LINES:
        raise PayloadError(f"text/csv: at most {MAX_CSV_LINES} ends of lines")
    reader = csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        if len(reader.fieldnames or ()) > MAX_CSV_COLUMNS:
            raise PayloadError(f"text/csv: at most {MAX_CSV_COLUMNS} columns")
        rows = list(reader)
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
    level, left = [value], most
    with contextlib.suppress(RecursionError):  # of arguments
        for _ in range(MAX_DEPTH):
            others = (each for each in level if {*map(type, each)} != {int} or min(each) < 0)
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
