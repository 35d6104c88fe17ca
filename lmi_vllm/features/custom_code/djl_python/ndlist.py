"""LMI's `np_util`: arrays as DJL's NDList (`tensor/ndlist`), which its Java clients read and write.

Numbers are big-endian. After the count of arrays each begins with `NDAR`, version 3, a flag, an
optional name and `default`. Then come the type, the sides, a layout character for each, the byte
order, and the data.
"""

import io
import struct
from typing import Any, Final

_MAGIC: Final = "NDAR"
_VERSION: Final = 3
_MAX_SIDES: Final = 32  # numpy's own limit of old
_ZIP: Final = b"PK"
_NPY: Final = b"\x93NUMPY"


def to_nd_list(np_list: Any) -> bytearray:
    """Return arrays, or one array, as an NDList."""
    arrays = np_list if isinstance(np_list, list) else [np_list]
    out = bytearray(struct.pack(">i", len(arrays)))
    for array in arrays:
        out += _text(_MAGIC) + struct.pack(">ib", _VERSION, 0)
        out += _text("default") + _text(str(array.dtype).upper())
        out += struct.pack(f">i{array.ndim}q", array.ndim, *array.shape)
        out += struct.pack(">i", array.ndim) + "?".encode("utf-16-be") * array.ndim
        data = array.astype(array.dtype.newbyteorder("<")).tobytes("C")
        out += b"<" + struct.pack(">i", len(data)) + data
    return out


def from_nd_list(encoded: Any) -> list[Any]:
    """Return the arrays of an NDList, an .npz or an .npy.

    Raises:
        ValueError: it is none of them.
    """
    import numpy  # noqa: PLC0415 (only where a hook uses it)

    content = bytes(encoded)
    if content.startswith(_ZIP):
        arrays = numpy.load(io.BytesIO(content), allow_pickle=False)
        return [arrays[name] for name in arrays.files]
    if content.startswith(_NPY):
        return [numpy.load(io.BytesIO(content), allow_pickle=False)]
    try:
        reader = _Reader(content)
        if (count := reader.number("i")) < 0:
            raise ValueError(f"the content is not an NDList: it has {count} arrays")
        return [reader.array() for _ in range(count)]
    except (struct.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"the content is not an NDList: {error}") from error


class _Reader:
    """Reads an NDList from its beginning."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    def number(self, kind: str) -> int:
        """Return the next integer of a kind of `struct`."""
        value: int = struct.unpack(f">{kind}", self._take(struct.calcsize(f">{kind}")))[0]
        return value

    def array(self) -> Any:
        """Return the next array.

        Raises:
            ValueError: it is not in this format.
        """
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        if (magic := self._text()) != _MAGIC:
            raise ValueError(f"the content is not an NDList: {magic!r} is not {_MAGIC}")
        if (version := self.number("i")) != _VERSION:
            raise ValueError(f"version {version} of an NDList, not {_VERSION}")
        if self.number("b") == 1:
            self._text()  # the array's name
        self._text()  # the format of sparse arrays
        kind = numpy.dtype(self._text().lower())
        sides = self._sides()
        is_big = chr(self.number("b")) == ">"
        data = self._take(self.number("i"))
        kind = kind.newbyteorder(">" if is_big else "<")
        return numpy.frombuffer(data, kind).reshape(sides).copy()

    def _sides(self) -> tuple[int, ...]:
        count = self.number("i")
        if not 0 <= count <= _MAX_SIDES:
            raise ValueError(f"an array of an NDList has {count} sides")
        sides = tuple(self.number("q") for _ in range(count))
        self._take(2 * self.number("i"))  # the layout
        return sides

    def _text(self) -> str:
        return self._take(self.number("h")).decode()

    def _take(self, size: int) -> bytes:
        taken = self._content[self._place : self._place + size] if size >= 0 else b""
        if len(taken) != size:
            raise ValueError("the content is not an NDList: it ends too early")
        self._place += size
        return taken


def _text(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
