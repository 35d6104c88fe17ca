"""Tensors of the protocol, in both of their forms."""

from typing import Any

import pytest

from lmi_vllm.errors import PayloadError
from lmi_vllm.features.kserve.tensors import (
    DATATYPES,
    MAX_ELEMENTS,
    KserveTensor,
    binary_tensor,
    read_tensors,
)

TEXT = {"name": "t", "shape": [1], "datatype": "BYTES", "data": ["x"]}


@pytest.mark.parametrize("datatype", DATATYPES)
def test_tensor_survives_its_binary_form(datatype: str) -> None:
    """What is written is read back, for every datatype."""
    values: tuple[Any, ...] = ("é", "", "two words") if datatype == "BYTES" else (1, 0, 1)
    tensor = KserveTensor("t", datatype, (3,), values)
    head, data = binary_tensor(tensor)
    assert read_tensors([head], data) == [tensor]


def test_nested_data_is_read_row_by_row() -> None:
    """A matrix may be given nested or flat."""
    for data in ([[1, 2], [3, 4]], [1, 2, 3, 4]):
        tensor = {"name": "t", "shape": [2, 2], "datatype": "INT32", "data": data}
        assert read_tensors([tensor], b"")[0].values == (1, 2, 3, 4)


def test_as_many_elements_as_are_read() -> None:
    """Numbers in binary form, texts as JSON: the bound is of both together."""
    binary = {"name": "n", "shape": [65535], "datatype": "BOOL"}
    given = [{**binary, "parameters": {"binary_data_size": 65535}}, TEXT]
    assert sum(len(one.values) for one in read_tensors(given, bytes(65535))) == MAX_ELEMENTS


BAD = {
    "no list": ({}, b"", "list of tensors"),
    "none": ([], b"", "list of tensors"),
    "no tensor": ([3], b"", "inputs[0]"),
    "no name": ([{**TEXT, "name": ""}], b"", "inputs[0]"),
    "datatype": ([{**TEXT, "datatype": "STRING"}], b"", "datatype must be one of BYTES"),
    "shape": ([{**TEXT, "shape": [-1]}], b"", "shape must be"),
    "deep shape": ([{**TEXT, "shape": [1] * 9}], b"", "shape must be"),
    "data": ([{**TEXT, "data": "x"}], b"", "data must be a list"),
    "kind": ([{**TEXT, "data": [1]}], b"", "not all BYTES"),
    "flag for a number": (
        [{**TEXT, "datatype": "INT32", "data": [True]}],
        b"",
        "not all INT32",
    ),
    "deeper than its shape": ([{**TEXT, "data": [["x"]]}], b"", "not all BYTES"),
    "count": ([{**TEXT, "shape": [2]}], b"", "has 2 elements, its data 1"),
    "size": ([{**TEXT, "parameters": {"binary_data_size": "x"}}], b"", "whole number"),
    "short": ([{**TEXT, "parameters": {"binary_data_size": 9}}], b"x", "ends before its 9"),
    "length": ([{**TEXT, "parameters": {"binary_data_size": 2}}], b"xx", "within a length"),
    "element": (
        [{**TEXT, "parameters": {"binary_data_size": 5}}],
        b"\x02\0\0\0x",
        "within an element",
    ),
    "no text": ([{**TEXT, "parameters": {"binary_data_size": 5}}], b"\x01\0\0\0\xff", "UTF-8"),
    "odd": (
        [{**TEXT, "datatype": "INT32", "parameters": {"binary_data_size": 5}}],
        b"12345",
        "no whole number of INT32",
    ),
    "left over": ([TEXT], b"x", "1 bytes long, the inputs say 0"),
    "many tensors": ([{}] * 1025, b"", "at most 1024 tensors"),
    "a large shape": ([{**TEXT, "shape": [65536, 2]}], b"", "t: at most 65536 elements"),
    "large together": (
        [{**TEXT, "shape": [2], "data": ["x"] * 2}, {**TEXT, "name": "u", "shape": [65535]}],
        b"",
        "u: at most 65536 elements",
    ),
    "more numbers than its shape": (
        [{**TEXT, "datatype": "UINT8", "parameters": {"binary_data_size": 65537}}],
        bytes(65537),
        "t: at most 65536 elements",
    ),
    "more texts than its shape": (
        [{**TEXT, "parameters": {"binary_data_size": 4 * 70_000}}],
        bytes(4 * 70_000),
        "has 1 elements, its data 65537",
    ),
    "more values than its shape": ([{**TEXT, "data": ["x"] * 65537}], b"", "at most 65536"),
    "rows of more values": ([{**TEXT, "shape": [1, 1], "data": [["x"] * 65537]}], b"", "at most"),
}


@pytest.mark.parametrize(("given", "rest", "said"), BAD.values(), ids=BAD)
def test_bad_tensor_is_named(given: object, rest: bytes, said: str) -> None:
    """Each mistake is the client's, and the text says which."""
    with pytest.raises(PayloadError) as raised:
        read_tensors(given, rest)
    assert said in str(raised.value)
