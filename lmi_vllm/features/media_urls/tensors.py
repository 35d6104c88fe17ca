"""Bounds on the tensors of a request (`enable_prompt_embeds`, `enable_mm_embeds`).

`torch.load` decompresses a ZIP archive and repeats values by strides, and vLLM makes sparse ones
dense. So a tensor may have as many bytes as the request has of it. The pickle inside may call what
torch trusts, some of which takes gigabytes or minutes: `bytearray(2 << 30)`, or a `Counter` over a
text. So only the calls and the values of a tensor are read. What comes from a file is loaded as
before.

Upstream: none yet.
Releases: 0.31 and later.
Shows: 8 MB of embeddings were 9 GB, and another client's prompt waited 20 s. 554 bytes of a pickle
    took 2 GiB, or 6.6 s of the event loop.
May go: when test_plain_vllm_loads_a_tensor_that_is_larger_than_its_bytes and
    test_plain_torch_calls_what_is_no_tensor fail.
"""

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Final

import numpy
import torch

MAX_PICKLE: Final = 64 << 10  # bytes; that of a tensor has 200
# The ends of a ZIP archive, of 32 and 64 bits: the size and place of its list of entries.
_END: Final = struct.Struct("<4s8xLLH")
_END_64: Final = struct.Struct("<4sQ28xQQ")
_LOCATOR: Final = struct.Struct("<4sLQL")  # of the second

# The calls by which torch.save writes a tensor or a parameter, and the types that it names.
_NAMES: Final = re.compile(
    r"torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter|sparse_tensor)|collections OrderedDict|"
    r"torch\.storage UntypedStorage|torch \w+Storage|torch Size|torch\.serialization _get_layout|"
    r"torch (float|bfloat|int|uint|complex|float8_)\w*|torch\.nn\.parameter Parameter"
)
# Constants, tuples, names, references to texts and names, and calls: no containers that hash.
_TEXTS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "UNICODE", "GLOBAL"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"BINGET", "LONG_BINGET"})
_OPCODES: Final = (
    _TEXTS
    | _PUTS
    | _GETS
    | {"PROTO", "MARK", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "NONE", "STOP"}
    | {"BININT", "BININT1", "BININT2", "LONG1", "NEWTRUE", "NEWFALSE", "BINPERSID", "REDUCE"}
)


def guard_tensors() -> None:
    """Have every tensor of a request loaded within its bytes; once is enough."""
    if getattr(torch.load, "func", None) is not load_within:
        torch.load = partial(load_within, torch.load)
    if getattr(numpy.load, "func", None) is not load_array_within:
        numpy.load = partial(load_array_within, numpy.load)


def load_within(load: Callable[..., Any], file: Any, **options: Any) -> Any:
    """Load a tensor that is no larger than its bytes; `load` is torch's own function.

    Raises:
        ValueError: it is larger, or cannot be read.
    """
    return _within(load, file, options, _check_archive, _size_of_tensor)


def load_array_within(load: Callable[..., Any], file: Any, **options: Any) -> Any:
    """As `load_within`, for an array; `load` is numpy's own function."""
    return _within(load, file, options, _size_of_array, lambda array: int(array.nbytes))


def _within(
    load: Callable[..., Any],
    file: Any,
    options: Mapping[str, Any],
    declared_size: Callable[[io.BytesIO], int],
    size_of: Callable[[Any], int],
) -> Any:
    if not isinstance(file, io.BytesIO):
        return load(file, **options)
    most = file.getbuffer().nbytes
    loaded = None
    try:
        size = declared_size(file)
        file.seek(0)
        if size <= most:
            loaded = load(file, **options)
            size = size_of(loaded)
    except (Exception, RecursionError) as error:
        raise ValueError(f"a tensor cannot be read: {error}") from error
    if size > most:
        raise ValueError(f"a tensor has {size} bytes when it is loaded, and {most} in the request")
    return loaded


def _size_of_tensor(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _check_archive(file: io.BytesIO) -> int:
    """Return the size of what an archive of `torch.save` unpacks to; its pickle is a tensor's.

    Raises:
        ValueError: it is none, or its pickle has more than a tensor.
    """
    _check_end(file.getvalue())  # no copy
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        size = sum(one.file_size for one in entries)
        pickles = [one for one in entries if one.filename.endswith(".pkl")]
        if size <= file.getbuffer().nbytes:
            for one in pickles:
                if one.file_size > MAX_PICKLE:
                    raise ValueError(f"its pickle has more than {MAX_PICKLE} bytes")
                check_pickle(archive.read(one))
    return size


def _check_end(content: bytes) -> None:
    """Check that the archive has one list of entries: torch's reader and Python's read the same.

    Raises:
        ValueError: it ends otherwise than what torch.save writes.
    """
    end = len(content) - _END.size
    if end >= 0 and content[:2] == b"PK":
        mark, size, start, comment = _END.unpack_from(content, end)
        is_end = mark == b"PK\x05\x06" and not comment
        place = end - _LOCATOR.size
        if place >= _END_64.size and content[place : place + 4] == b"PK\x06\x07":
            _, _, end, _ = _LOCATOR.unpack_from(content, place)
            is_end = is_end and end == place - _END_64.size
            if is_end:
                mark, length, size, start = _END_64.unpack_from(content, end)
                is_end = mark == b"PK\x06\x06" and length == _END_64.size - 12
        if is_end and start + size == end:
            return
    raise ValueError("it is not what torch.save writes (a ZIP archive)")


def check_pickle(pickle: bytes) -> None:
    """Check that a pickle is that of a tensor: nothing in it is called, or takes time or memory.

    References are to texts and names only, so that no tuple is repeated in itself.

    Raises:
        ValueError: it has more.
    """
    texts: set[int] = set()
    before = ""
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name not in _OPCODES:
            raise ValueError(f"its pickle has more than a tensor ({opcode.name})")
        if opcode.name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
            raise ValueError(f"its pickle has more than a tensor ({str(argument)[:100]})")
        if opcode.name in _PUTS and isinstance(argument, int):
            (texts.add if before in _TEXTS else texts.discard)(argument)
        if opcode.name in _GETS and argument not in texts:
            raise ValueError("its pickle repeats more than texts")
        before = opcode.name


def _size_of_array(file: io.BytesIO) -> int:
    """Return the bytes of an array by the head of its file."""
    formats: Any = numpy.lib.format
    is_first = formats.read_magic(file) == (1, 0)
    read = formats.read_array_header_1_0 if is_first else formats.read_array_header_2_0
    shape, _, dtype = read(file)
    return prod(map(int, shape)) * max(int(dtype.itemsize), 1)
