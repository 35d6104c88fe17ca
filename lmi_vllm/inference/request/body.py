"""The body of a request: its bytes become a payload, with bounds on the work of reading them."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from lmi_vllm.errors import PayloadError
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
MAX_DEPTH: Final = 200  # levels; orjson writes 254, Python's parsers and templates fail at 1000
MAX_CSV_LINES: Final = 1 << 15
MAX_CSV_COLUMNS: Final = 64


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


def not_json(error: ValueError, content_type: str) -> str:
    """Return what is wrong with a body, on a route that reads JSON alone."""
    kind = content_type.partition(";")[0].strip()
    form = f" (forms are not read here, and it is {kind})" if "form" in kind else ""
    return f"body is not valid JSON{form}: {error}"


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
