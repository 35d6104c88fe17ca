"""Decorators that mark functions of a model.py."""

from collections.abc import Callable
from typing import Any, TypeVar

from lmi_vllm.inference.hooks.functions import INIT_HANDLER, INPUT_FORMATTER, PREDICTION_HANDLER

Function = TypeVar("Function", bound=Callable[..., Any])

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"


def input_formatter(function: Function) -> Function:
    """Let the function turn each decoded payload into another."""
    setattr(function, INPUT_FORMATTER, True)
    return function


def prediction_handler(function: Function) -> Function:
    """Mark a function that LLM serving has no use for; loading it is a warning."""
    setattr(function, PREDICTION_HANDLER, True)
    return function


def init_handler(function: Function) -> Function:
    """Mark a function that LLM serving has no use for; loading it is a warning."""
    setattr(function, INIT_HANDLER, True)
    return function
