"""How hooks are called and what they may return."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.functions import (
    HookContext,
    HookError,
    InputFunction,
    OutputFunction,
    new_body,
    new_payload,
)

GIVEN = Input()
TOLD = HookContext({"inputs": "x", "parameters": {"n": 1}}, tokenizer="tok", input=GIVEN)
REQUEST = TOLD.request


def annotated(item: Input, **kwargs: Any) -> Any:
    """Look like a formatter of LMI's older API."""
    return item


INPUT_STYLES: dict[str, tuple[Callable[..., Any], Any]] = {
    "one": (lambda p: [p], [REQUEST]),
    "tokenizer": (lambda p, tokenizer: [p, tokenizer], [REQUEST, "tok"]),
    "default": (lambda p, tokenizer=None, more=3: [tokenizer, more], ["tok", 3]),
    "kwargs": (lambda p, **kwargs: kwargs, {"tokenizer": "tok"}),
    "input": (annotated, GIVEN),
}


@pytest.mark.parametrize("style", INPUT_STYLES)
def test_input_hook_gets_the_arguments_it_takes(style: str) -> None:
    """The payload first; the tokenizer by keyword where there is room for it."""
    function, expected = INPUT_STYLES[style]
    assert InputFunction.of(function).call(TOLD) == expected


OUTPUT_STYLES: dict[str, tuple[Callable[..., Any], Any]] = {
    "one": (lambda r: [r], ["r"]),
    "two": (lambda r, payload: [r, payload], ["r", REQUEST]),
    "named": (lambda r, tokenizer: [r, tokenizer], ["r", "tok"]),
    "kwargs": (
        lambda r, **kwargs: kwargs,
        {"tokenizer": "tok", "request": REQUEST, "parameters": {"n": 1}},
    ),
    "positional": (lambda *arguments: arguments, ("r",)),
}


@pytest.mark.parametrize("style", OUTPUT_STYLES)
def test_output_hook_gets_the_arguments_it_takes(style: str) -> None:
    """VLLM's response first; a second argument is the request; keywords by name."""
    function, expected = OUTPUT_STYLES[style]
    assert OutputFunction.of(function).call("r", TOLD) == expected


class Pydantic:
    """Has pydantic's way to say its JSON."""

    def model_dump_json(self) -> str:
        """Return JSON."""
        return '{"a": 1}'


class Dumps:
    """Has pydantic's way to say its content."""

    def model_dump(self) -> dict[str, int]:
        """Return content."""
        return {"a": 1}


@dataclass
class Plain:
    """A dataclass."""

    a: int = 1


@pytest.mark.parametrize(
    ("result", "body"),
    [
        ("text", b"text"),
        (b"bytes", b"bytes"),
        ({"a": "ü", 1: [Dumps()]}, '{"a":"ü","1":[{"a":1}]}'.encode()),
        (Pydantic(), b'{"a": 1}'),
        (Dumps(), b'{"a":1}'),
        (Plain(), b'{"a":1}'),
    ],
    ids=["str", "bytes", "dict", "model_dump_json", "model_dump", "dataclass"],
)
def test_new_body_is_the_hooks_result(result: object, body: bytes) -> None:
    """Text as it is, objects by their JSON dump, the rest as compact JSON."""
    assert new_body(result) == body


def test_new_body_refuses_values_without_json() -> None:
    """The message names the type."""
    with pytest.raises(HookError, match="set"):
        new_body({1, 2})


def test_new_payload_takes_a_dict_or_the_older_text_input() -> None:
    """Anything else is an error that names its type."""
    assert new_payload({"a": 1}) == {"a": 1}
    older = SimpleNamespace(input_text="x", parameters={"n": 1})
    assert new_payload(older) == {"inputs": "x", "parameters": {"n": 1}}
    with pytest.raises(HookError, match="NoneType"):
        new_payload(None)
