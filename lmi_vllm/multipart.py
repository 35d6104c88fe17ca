"""Forms with files (`multipart/form-data`, RFC 7578): their text fields, and one put in place.

Only the heads of parts are parsed: a recording is megabytes, of which nothing is looked at.
"""

from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Final, NamedTuple

KIND: Final = "multipart/form-data"
_DISPOSITION: Final = "content-disposition"
_LINE: Final = b"\r\n"
_LONGEST_FIELD: Final = 64 << 10  # bytes


def boundary_of(content_type: str) -> bytes:
    """Return what separates the parts of such a form; nothing where it is none."""
    message = Message()
    message["content-type"] = content_type
    if message.get_content_type() != KIND:
        return b""
    return str(message.get_param("boundary", "")).encode("latin-1", "replace")


def text_fields(body: bytes, boundary: bytes) -> Mapping[str, str]:
    """Return the fields that are no files; of one given twice the last counts."""
    return {
        part.name: part.content.decode("utf-8", "replace")
        for part in _parts(body, boundary)
        if not part.is_file and len(part.content) <= _LONGEST_FIELD
    }


def with_field(body: bytes, boundary: bytes, name: str, value: str) -> bytes:
    """Return the form with the field in place of all of its name.

    It is the last one: a reader who finds another of that name after all goes by the last.
    """
    field = f'\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
    kept = [part.whole for part in _parts(body, boundary) if part.name != name]
    lines = [b"--%b%b\r\n" % (boundary, part) for part in (*kept, field)]
    return b"".join([*lines, b"--%b--\r\n" % boundary])


class _Part(NamedTuple):
    """One field: all after its separator, and what that says."""

    whole: bytes
    name: str
    is_file: bool
    content: bytes


def _parts(body: bytes, boundary: bytes) -> Iterator[_Part]:
    for whole in (_LINE + body).split(_LINE + b"--" + boundary)[1:]:
        if whole.startswith(b"--"):  # the end of the form
            return
        head, _, content = whole.partition(_LINE * 2)
        fields = BytesHeaderParser().parsebytes(head.lstrip())
        name, file = (fields.get_param(key, None, _DISPOSITION) for key in ("name", "filename"))
        yield _Part(whole, str(name), file is not None, content)
