"""Forms with files, read and changed as vLLM's own parser of them reads the result."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.datastructures import Headers

from lmi_vllm.multipart import boundary_of, text_fields, with_field

pytestmark = pytest.mark.vllm

SOUND = b"\x00\r\n--other\r\n--\xff" + bytes(range(256)) * 20
FILE = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a;\\"b\\".wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\n" + SOUND + b"\r\n"
)
MODEL = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nold\r\n'
OTHER = b"--x\r\ncontent-disposition: form-data; name=language\r\n\r\n\xc3\xa9\r\n"
END = b"--x--\r\n"
FORMS = {
    "model first": MODEL + OTHER + FILE + END,
    "model last": FILE + OTHER + MODEL + END,
    "two models": MODEL + FILE + MODEL.replace(b"old", b"older") + OTHER + END,
    "no model": OTHER + FILE + END,
    "a model that is a file": OTHER + FILE + FILE.replace(b'"file"', b'"model"') + END,
    "no line at the end": MODEL + OTHER + FILE + b"--x--",
    "text after the end": MODEL + OTHER + FILE + END + b"anything",
    "more headers": MODEL.replace(b"\r\n\r\n", b"\r\nX-Mine: 1\r\n\r\n") + OTHER + FILE + END,
}
KINDS = {"plain": "multipart/form-data; boundary=x", "quoted": 'Multipart/Form-Data; boundary="x"'}


def read(body: bytes) -> dict[str, object]:
    """Return the fields that a handler of vLLM's would get."""
    from starlette.formparsers import MultiPartParser  # noqa: PLC0415 (needs python-multipart)

    async def stream() -> AsyncIterator[bytes]:
        yield body

    async def parsed() -> dict[str, object]:
        headers = Headers({"content-type": KINDS["plain"]})
        form = await MultiPartParser(headers, stream()).parse()  # type: ignore[arg-type]
        fields = {
            name: value if isinstance(value, str) else await value.read()
            for name, value in form.items()
        }
        await form.close()
        return fields

    return asyncio.run(parsed())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_field_is_put_in_place_of_all_of_its_name(body: bytes, kind: str) -> None:
    """And nothing else of the form changes, its bytes least of all."""
    boundary = boundary_of(kind)
    changed = with_field(body, boundary, "model", "new")
    assert read(changed) == {"model": "new", "language": "é", "file": SOUND}
    assert changed.count(b'name="model"') == 1


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
def test_text_fields_are_those_that_are_read(body: bytes) -> None:
    """Of two with one name the last counts."""
    expected = {name: value for name, value in read(body).items() if isinstance(value, str)}
    assert text_fields(body, b"x") == expected


@pytest.mark.parametrize("kind", ["", "application/json", "text/plain; boundary=x", "multipart"])
def test_other_bodies_have_no_boundary(kind: str) -> None:
    """They are no such forms."""
    assert boundary_of(kind) == b""


@pytest.mark.parametrize("body", [b"", b"{", b"--x", b"--x\r\n\r\n", b"--y\r\n\r\n--y--"])
def test_non_form_body_has_no_fields(body: bytes) -> None:
    """Nothing is raised; it is vLLM's to refuse."""
    assert "model" not in text_fields(body, b"x")
    assert b'name="model"' in with_field(body, b"x", "model", "new")
