"""The decorator of an output hook, and the types its annotations name."""

from collections.abc import Callable
from typing import Any, TypeVar

from lmi_vllm.extras.djl_python.names.request_io import (
    RequestOutput,
    Sequence,
    TextGenerationOutput,
    Token,
)
from lmi_vllm.inference.hooks.functions import OUTPUT_FORMATTER

__all__ = ["RequestOutput", "Sequence", "TextGenerationOutput", "Token", "output_formatter"]

Function = TypeVar("Function", bound=Callable[..., Any])


def output_formatter(function: Function) -> Function:
    """Let the function make the final body of each answer out of vLLM's own response."""
    setattr(function, OUTPUT_FORMATTER, True)
    return function
