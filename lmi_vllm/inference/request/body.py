"""The bytes of a body to a payload, and which kind of payload that is."""

import csv
import io
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from email.policy import HTTP
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qsl

import orjson

from lmi_vllm.errors import PayloadError

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
