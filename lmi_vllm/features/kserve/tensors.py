"""Tensors of the Open Inference Protocol: as JSON, and as the bytes of its binary extension.

The protocol is that of https://github.com/kserve/open-inference-protocol (inference_rest.md); the
extension is Triton's `binary_tensor_data`, which its clients and KServe's use unless told not to: a
tensor with `binary_data_size` has no `data`, its bytes follow the JSON part in the order of the
tensors, and `Inference-Header-Content-Length` says how long that part is.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import PayloadError

BYTES: Final = "BYTES"
SIZE: Final = "binary_data_size"
# Datatype -> how `struct` writes one element, and the types that JSON may give it.
_NUMBERS: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = MappingProxyType(
    {
        "BOOL": ("?", (bool,)),
        "UINT8": ("B", (int,)),
        "UINT16": ("H", (int,)),
        "UINT32": ("I", (int,)),
        "UINT64": ("Q", (int,)),
        "INT8": ("b", (int,)),
        "INT16": ("h", (int,)),
        "INT32": ("i", (int,)),
        "INT64": ("q", (int,)),
        "FP16": ("e", (int, float)),
        "FP32": ("f", (int, float)),
        "FP64": ("d", (int, float)),
    }
)
DATATYPES: Final = (BYTES, *_NUMBERS)
_DIMENSIONS: Final = 8  # of one tensor
_MAX_TENSORS: Final = 1024
# Of all tensors together. Each becomes an object while other requests wait.
MAX_ELEMENTS: Final = 1 << 16
_LENGTH: Final = struct.Struct("<I")  # of one element of BYTES


@dataclass(frozen=True, slots=True)
class KserveTensor:
    """One tensor; `values` are its elements row by row, texts for BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: tuple[Any, ...]


def read_tensors(given: object, rest: bytes) -> list[KserveTensor]:
    """Return the input tensors of a request; `rest` is what follows its JSON part.

    Raises:
        PayloadError: names the tensor and what is wrong with it.
    """
    if not isinstance(given, list) or not given:
        raise PayloadError("inputs: expected a list of tensors")
    if len(given) > _MAX_TENSORS:
        raise PayloadError(f"inputs: at most {_MAX_TENSORS} tensors")
    tensors, start, elements = [], 0, 0
    for position, one in enumerate(given):
        name, datatype, shape = _metadata(one, f"inputs[{position}]")
        size, count = _size(one, name), math.prod(shape)
        elements += count
        _check_most(name, elements)
        if size is None:
            values = _json_values(one.get("data"), datatype, shape, name)
        else:
            values = _binary_values(rest[start : start + size], size, datatype, name)
            start += size
        if len(values) != count:
            raise PayloadError(f"{name}: its shape has {count} elements, its data {len(values)}")
        tensors.append(KserveTensor(name, datatype, shape, values))
    if start != len(rest):
        raise PayloadError(f"the binary data is {len(rest)} bytes long, the inputs say {start}")
    return tensors


def json_tensor(tensor: KserveTensor) -> dict[str, object]:
    """Return an output tensor as a JSON object with `data`."""
    head = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    return {**head, "data": list(tensor.values)}


def binary_tensor(tensor: KserveTensor) -> tuple[dict[str, object], bytes]:
    """Return an output tensor's JSON object with its size, and its little-endian bytes."""
    data = _packed(tensor)
    head = {"name": tensor.name, "shape": list(tensor.shape), "datatype": tensor.datatype}
    return {**head, "parameters": {SIZE: len(data)}}, data


def _metadata(one: object, place: str) -> tuple[str, str, tuple[int, ...]]:
    if not isinstance(one, dict) or not isinstance(one.get("name"), str) or not one["name"]:
        raise PayloadError(f"{place}: expected a tensor with name, shape, datatype and data")
    name, datatype, shape = one["name"], one.get("datatype"), one.get("shape")
    if datatype not in DATATYPES:
        raise PayloadError(f"{name}: datatype must be one of {', '.join(DATATYPES)}")
    is_shape = isinstance(shape, list) and all(_is_count(number) for number in shape)
    if not is_shape or len(shape) > _DIMENSIONS:  # type: ignore[arg-type]
        raise PayloadError(f"{name}: shape must be a list of up to {_DIMENSIONS} whole numbers")
    return name, str(datatype), tuple(shape)  # type: ignore[arg-type]


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _size(one: Mapping[str, Any], name: str) -> int | None:
    """Return the bytes of binary data of a tensor; None where it has `data` in JSON."""
    parameters = one.get("parameters")
    size = parameters.get(SIZE) if isinstance(parameters, dict) else None
    if size is not None and not _is_count(size):
        raise PayloadError(f"{name}: parameters.{SIZE} must be a whole number")
    return size


def _json_values(data: object, datatype: str, shape: Sequence[int], name: str) -> tuple[Any, ...]:
    """Return the elements of `data`, which is flat or nested as the shape says."""
    if not isinstance(data, list):
        raise PayloadError(f"{name}: data must be a list")
    for _ in shape[1:]:
        _check_most(name, len(data))
        data = [item for row in data for item in (row if isinstance(row, list) else (row,))]
    _check_most(name, len(data))
    kinds = (str,) if datatype == BYTES else _NUMBERS[datatype][1]
    if not all(_has_type(item, kinds) for item in data):
        raise PayloadError(f"{name}: its data are not all {datatype}")
    return tuple(data)


def _has_type(item: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(item, kinds) and (bool in kinds or not isinstance(item, bool))


def _binary_values(data: bytes, size: int, datatype: str, name: str) -> tuple[Any, ...]:
    if len(data) != size:
        raise PayloadError(f"{name}: the binary data ends before its {size} bytes")
    if datatype == BYTES:
        return tuple(islice(_texts(data, name), MAX_ELEMENTS + 1))
    code = _NUMBERS[datatype][0]
    count, rest = divmod(size, struct.calcsize(f"<{code}"))
    if rest:
        raise PayloadError(f"{name}: {size} bytes are no whole number of {datatype}")
    _check_most(name, count)
    return struct.unpack(f"<{count}{code}", data)


def _check_most(name: str, count: int) -> None:
    if count > MAX_ELEMENTS:
        raise PayloadError(f"{name}: at most {MAX_ELEMENTS} elements in all tensors")


def _texts(data: bytes, name: str) -> Iterator[str]:
    """Yield the UTF-8 texts of BYTES, each preceded by its 4-byte length."""
    start = 0
    while start < len(data):
        if start + _LENGTH.size > len(data):
            raise PayloadError(f"{name}: its binary data ends within a length")
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        element, start = data[start : start + length], start + length
        if start > len(data):
            raise PayloadError(f"{name}: its binary data ends within an element")
        try:
            yield element.decode()
        except UnicodeDecodeError:
            raise PayloadError(f"{name}: its bytes are not UTF-8 text") from None


def _packed(tensor: KserveTensor) -> bytes:
    if tensor.datatype != BYTES:
        code = _NUMBERS[tensor.datatype][0]
        return struct.pack(f"<{len(tensor.values)}{code}", *tensor.values)
    elements = (value.encode() for value in tensor.values)
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)
