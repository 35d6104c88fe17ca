"""Types that hooks of LMI's older API name; answers come as vLLM's own objects today."""

from dataclasses import dataclass, field
from typing import Any


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
