"""LMI's `input_parser`, `output_formatter` and `request_io`: decorators, and the types they name.

Answers come to hooks as vLLM's own objects today; the types are for annotations and older hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"

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


@dataclass
class Token:
    """A generated token."""

    id: int = 0
    text: str = ""
    log_prob: float | None = None
    special_token: bool | None = None


@dataclass
class Sequence:
    """The tokens of one candidate."""

    tokens: list[Token] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None


@dataclass
class RequestInput:
    """What an input hook of the older API returns."""

    request_id: int = 0
    output_formatter: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class TextInput(RequestInput):
    """A prompt with its parameters; an input hook may return it instead of a payload."""

    input_text: str | list[str] = ""
    adapters: Any = None


@dataclass
class RequestOutput:
    """The base of the older API's answers."""

    request_id: int = 0
    finished: bool = False
    input: RequestInput | None = None


@dataclass
class TextGenerationOutput(RequestOutput):
    """The older API's answer to a text generation request."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
