"""LMI's `input_parser` and `output_formatter`: decorators, and names beside them."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.request_io import (
    RequestInput,
    RequestOutput,
    Sequence,
    TextGenerationOutput,
    TextInput,
    Token,
)

__all__ = [
    "RequestInput",
    "RequestOutput",
    "Sequence",
    "TextGenerationOutput",
    "TextInput",
    "Token",
    "init_handler",
    "input_formatter",
    "output_formatter",
    "parse_adapters",
    "prediction_handler",
]

Function = TypeVar("Function", bound=Callable[..., Any])

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_ALIAS_HEADER: Final = "X-Amzn-SageMaker-Adapter-Alias"

# The attributes that mark a decorated function; LMI's names.
INPUT_FORMATTER: Final = "is_input_formatter"
OUTPUT_FORMATTER: Final = "is_output_formatter"
PREDICTION_HANDLER: Final = "is_prediction_handler"
INIT_HANDLER: Final = "is_init_handler"


def input_formatter(function: Function) -> Function:
    """Mark the function that turns each decoded payload into another."""
    setattr(function, INPUT_FORMATTER, True)
    return function


def prediction_handler(function: Function) -> Function:
    """Mark a function that is never called here; loading it logs a warning."""
    setattr(function, PREDICTION_HANDLER, True)
    return function


def init_handler(function: Function) -> Function:
    """Mark a function that is never called here; loading it logs a warning."""
    setattr(function, INIT_HANDLER, True)
    return function


def output_formatter(function: Function) -> Function:
    """Mark the function that makes the final body of each answer out of vLLM's response."""
    setattr(function, OUTPUT_FORMATTER, True)
    return function


def parse_adapters(
    request_input: TextInput, input_item: Input, input_map: dict[str, Any], **kwargs: Any
) -> None:
    """Set the adapters of a request: from the header, the content, or the payload's `adapters`.

    `configs` and `adapter_registry` are the handler's own.

    Raises:
        ValueError: one is not in the registry, or their number is not that of the prompts.
    """
    if not getattr(kwargs.get("configs"), "enable_lora", False):
        return
    registry: Mapping[str, Any] = kwargs.get("adapter_registry") or {}
    alias = None
    names: Any = input_map.pop("adapters", [])
    if input_item.contains_key("adapter"):
        names = input_item.get_as_string("adapter")
    if (name := input_item.get_property(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER)) is not None:
        names, alias = name, input_item.get_property(_ALIAS_HEADER)
    names = names if isinstance(names, list) else [names]
    for name in filter(None, names):
        if name not in registry:
            raise ValueError(f"Adapter {alias or name} is not registered")
    if not names:
        return
    text = request_input.input_text
    if len(names) != (len(text) if isinstance(text, list) else 1):
        raise ValueError("Number of adapters is not equal to the number of inputs")
    found = [registry.get(name) for name in names]
    request_input.adapters = found[0] if len(found) == 1 else found
