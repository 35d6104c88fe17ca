"""Reads the header of a safetensors file; a damaged file is named as such."""

import json
import shutil
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

Shape = tuple[int, ...]

_LENGTH_BYTES: Final = 8
# Far below safetensors' own limit of 100 MB, which takes seconds to parse. Adapters of all experts
# of a large mixture need 7 MB.
_LONGEST_HEADER_BYTES: Final = 8 << 20
_LONGEST_NAME: Final = 1000  # characters; those of models have less than 200
_MOST_SIDES: Final = 8  # of a tensor; a product of 99864 large ones took 21 s
_LARGEST: Final = (1 << 63) - 1  # torch's largest size
_BITS: Final[Mapping[str, int]] = MappingProxyType(
    {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16}
    | {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64}
)


class DamagedFileError(Exception):
    """The file is not what its header says, or has none."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its type as safetensors names it, and where its bytes begin."""

    dtype: str
    shape: Shape
    start: int

    @property
    def item_bytes(self) -> int:
        """The size of one number."""
        return _BITS[self.dtype] // 8


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return each tensor by name, after checking that the header fits the file.

    Raises:
        DamagedFileError: they do not.
        OSError: the file cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # who opens a named pipe waits for its other end
        raise DamagedFileError("it is no regular file")
    size = status.st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if len(start) < _LENGTH_BYTES:
            raise DamagedFileError("it is too short to be a safetensors file")
        (length,) = struct.unpack("<Q", start)
        if length > min(size - _LENGTH_BYTES, _LONGEST_HEADER_BYTES):
            most = f"at most {_LONGEST_HEADER_BYTES} are read"
            raise DamagedFileError(f"its header says {length} bytes, the file has {size}; {most}")
        header = _decoded(file.read(length))
    data_start = _LENGTH_BYTES + length
    data_bytes = size - data_start
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in header.items():
        if name != "__metadata__":
            shape, first, last = _checked(name, entry, data_bytes)
            tensors[name] = Tensor(entry["dtype"], shape, data_start + first)
            end = max(end, last)
    if end != data_bytes:
        raise DamagedFileError(f"its tensors end at byte {end} of {data_bytes}")
    return tensors


def rename_tensors(path: Path, target: Path, names: Mapping[str, str]) -> None:
    """Write a checked file again with other names; those that `names` lacks stay.

    Raises:
        DamagedFileError: two tensors would have one name.
        OSError: a file cannot be read or written.
    """
    with path.open("rb") as file, target.open("wb") as copy:
        (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
        entries = _decoded(file.read(length))
        renamed = {names.get(name, name): entry for name, entry in entries.items()}
        if len(renamed) < len(entries):
            raise DamagedFileError("two of its tensors have one name")
        header = json.dumps(renamed).encode()
        copy.write(struct.pack("<Q", len(header)) + header)
        shutil.copyfileobj(file, copy)


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedFileError("its header is not a JSON object")
    return header


def _checked(name: str, entry: Any, data_bytes: int) -> tuple[Shape, int, int]:
    """Return a tensor's shape, and where its data begins and ends."""
    if len(name) > _LONGEST_NAME:
        raise DamagedFileError(f"a name in it has more than {_LONGEST_NAME} characters")
    try:
        shape = tuple(entry["shape"])
        first, last = entry["data_offsets"]
        bits = _BITS[entry["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"its entry for {name} cannot be read: {error!r:.200}") from error
    if len(shape) > _MOST_SIDES or not all(map(_is_size, (*shape, first, last))):
        raise DamagedFileError(
            f"its entry for {name} has more than {_MOST_SIDES} sides, or a size or place that is "
            f"no whole number up to {_LARGEST}"
        )
    if not first <= last <= data_bytes:
        raise DamagedFileError(f"{name} lies outside of the file: {first}..{last} of {data_bytes}")
    if last - first != prod(shape) * bits // 8:
        raise DamagedFileError(f"{name} has {last - first} bytes, its shape {list(shape)} others")
    return shape, first, last


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST
