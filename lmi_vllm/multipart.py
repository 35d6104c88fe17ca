"""Forms with files (`multipart/form-data`, RFC 7578): reads their text fields and replaces one.

Only the headers of parts are parsed: a recording has megabytes that are not needed.
"""

import itertools
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Final, NamedTuple

from lmi_vllm.errors import PayloadError

KIND: Final = "multipart/form-data"
_DISPOSITION: Final = "content-disposition"
_LINE: Final = b"\r\n"
_LONGEST_FIELD: Final = 64 << 10  # bytes
# Headers are parsed while other requests wait: a megabyte of headers took 30 s.
MAX_PARTS: Final = 1000  # as in vLLM's own reader
_MAX_LINES: Final = 16  # of the headers of a part
_MAX_HEAD: Final = 4096  # bytes
_MAX_PARAMETERS: Final = 16  # parsing takes quadratic time in their number
_CODINGS: Final = ("binary", "8bit", "7bit")  # encodings that need no decoding


def boundary_of(content_type: str) -> bytes:
    """Return the separator of the form's parts; empty if it is no such form."""
    if KIND not in content_type.lower():  # most requests have no form and are not parsed
        return b""
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != KIND:
        return b""
    return str(message.get_param("boundary", "")).encode("latin-1", "replace")


def text_fields(body: bytes, boundary: bytes) -> Mapping[str, str]:
    """Return the fields that are no files; the last one counts for a repeated name.

    Raises:
        PayloadError: see `parts`.
    """
    return {
        part.name: part.content.decode("utf-8", "replace")
        for part in parts(body, boundary)
        if not part.is_file and len(part.content) <= _LONGEST_FIELD
    }


def with_field(body: bytes, boundary: bytes, name: str, value: str) -> bytes:
    """Return the form with this field in place of all fields of its name.

    It is the last field, because a reader that finds a field of that name twice uses the last.

    Raises:
        PayloadError: see `parts`.
    """
    field = f'\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
    kept = [part.whole for part in parts(body, boundary) if part.name != name]
    lines = [b"--%b%b\r\n" % (boundary, part) for part in (*kept, field)]
    return b"".join([*lines, b"--%b--\r\n" % boundary])


class Part(NamedTuple):
    """One field: everything after its separator, and what its headers say."""

    whole: bytes
    name: str
    is_file: bool
    kind: str  # empty if the part names none
    content: bytes
    problem: str  # why the content cannot be used; empty if it can


def parts(body: bytes, boundary: bytes) -> Iterator[Part]:
    """Yield the fields of a form.

    Raises:
        PayloadError: it has too many, or one whose headers are too many or too long.
    """
    # One more piece than fields comes before the first, and one after the last.
    pieces = (_LINE + body).split(_LINE + b"--" + boundary, MAX_PARTS + 2)
    wholes = [*itertools.takewhile(lambda whole: not whole.startswith(b"--"), pieces[1:])]
    if len(wholes) > MAX_PARTS:
        raise PayloadError(f"the form has more than {MAX_PARTS} fields")
    is_whole = len(wholes) < len(pieces) - 1
    for whole in wholes:
        head, end, content = whole.partition(_LINE * 2)
        if head.count(b"\n") > _MAX_LINES:
            raise PayloadError(f"a field of the form has more than {_MAX_LINES} headers")
        if len(head) > _MAX_HEAD or head.count(b";") > _MAX_PARAMETERS:
            raise PayloadError(
                f"the headers of a field of the form have more than {_MAX_HEAD} bytes or "
                f"{_MAX_PARAMETERS} parameters"
            )
        fields = BytesHeaderParser().parsebytes(head.lstrip())
        problem = "" if is_whole else "no closing boundary after it: the form is cut off"
        if not end:
            problem = "no empty line after its headers (lines end with CR LF)"
        coding = str(fields.get("content-transfer-encoding", _CODINGS[0]))
        if coding.lower() not in _CODINGS:
            problem = f"a Content-Transfer-Encoding other than {', '.join(_CODINGS)} (RFC 7578)"
        name, file = (fields.get_param(key, None, _DISPOSITION) for key in ("name", "filename"))
        kind = fields.get_content_type() if "content-type" in fields else ""
        yield Part(whole, str(name), file is not None, kind, content, problem)
