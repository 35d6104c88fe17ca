"""LMI's `request_io`: requests and answers of its rolling batch, for formatters written for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Token:
    """A generated token."""

    def __init__(
        self,
        id: int = 0,
        text: str = "",
        log_prob: float | None = None,
        special_token: bool | None = None,
        error_msg: str | None = None,
    ) -> None:
        self.id = id
        self.text = text
        self.log_prob = log_prob
        self.special_token = special_token
        self.request_id: int | None = None
        self.error_msg = error_msg

    def __repr__(self) -> str:
        return f"Token({self.as_dict()})"

    def as_dict(self) -> dict[str, Any]:
        """Return the token as LMI writes it."""
        shown: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        if self.special_token:
            shown["special_token"] = self.special_token
        if self.error_msg:
            shown["error_msg"] = self.error_msg
        return shown

    def as_tgi_dict(self) -> dict[str, Any]:
        """Return the token as TGI writes it."""
        shown: dict[str, Any] = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        return {**shown, "special": self.special_token} if self.special_token else shown


@dataclass
class Sequence:
    """The tokens of one candidate, and a place in them that formatters move on.

    LMI's documents unpack three values of `get_next_token`, its code returns four: the index too.
    `values_of_next` is the number that the user's file unpacks.
    """

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | None = None
    values_of_next: int = field(default=3, repr=False)
    _last_token_index: int | None = field(default=None, repr=False)
    _next: int = field(default=0, init=False, repr=False)
    _next_top: int = field(default=0, init=False, repr=False)

    def set_next_token(self, token: Token, is_last_token: bool = False) -> None:
        """Append a token."""
        self.tokens.append(token)
        if is_last_token:
            self._last_token_index = len(self.tokens) - 1

    def set_next_top_tokens(self, top_tokens: list[Token]) -> None:
        """Append the most probable tokens of a step."""
        self.top_tokens.append(top_tokens)

    def has_next_token(self) -> bool:
        """Return whether there is a token that was not read."""
        return self._next < len(self.tokens)

    def has_next_top_tokens(self) -> bool:
        """Return whether there are most probable tokens that were not read."""
        return self._next_top < len(self.top_tokens)

    def get_next_token(self) -> tuple[Any, ...]:
        """Return the next token, its index if asked for, whether it is the first, and the last."""
        token, index, is_first, is_last = None, 0, False, False
        if self.has_next_token():
            index = self._next
            self._next += 1
            token, is_first = self.tokens[index], index == 0
            is_last = index == self._last_token_index
        return (token, *(index,) * (self.values_of_next == 4), is_first, is_last)  # noqa: PLR2004

    def get_last_token(self) -> Token | None:
        """Return the last token of a complete sequence."""
        return None if self._last_token_index is None else self.tokens[self._last_token_index]

    def get_next_top_tokens(self) -> list[Token] | None:
        """Return the next list of most probable tokens, None after the last."""
        if not self.has_next_top_tokens():
            return None
        self._next_top += 1
        return self.top_tokens[self._next_top - 1]


@dataclass
class RequestInput:
    """What an input hook of the older API returns."""

    request_id: int = 0
    client_request_id: str | None = None
    output_formatter: Callable[..., Any] | str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)
    tgi_compat: bool = False


@dataclass
class TextInput(RequestInput):
    """A prompt with its parameters; an input hook may return it instead of a payload."""

    input_text: str | list[str] = ""
    adapters: Any = None
    tokenizer: Any = None


@dataclass
class RequestOutput:
    """The base of the older API's answers."""

    request_id: int = 0
    input: Any = None
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The older API's answer to a text generation request."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin the first sequence."""
        self.sequences.setdefault(self.best_sequence_index, Sequence())

    def set_next_token(
        self,
        token: Token,
        sequence_index: int = 0,
        is_last_token: bool = False,
        finish_reason: str | None = None,
    ) -> None:
        """Append a token to a sequence."""
        sequence = self.sequences.setdefault(sequence_index, Sequence())
        sequence.set_next_token(token, is_last_token)
        if finish_reason:
            sequence.finish_reason = finish_reason

    def set_next_top_tokens(self, top_tokens: list[Token], sequence_index: int) -> None:
        """Append the most probable tokens of a step to a sequence."""
        self.sequences[sequence_index].set_next_top_tokens(top_tokens)

    def set_best_sequence_index(self, sequence_index: int) -> None:
        """Say which sequence is the best."""
        self.best_sequence_index = sequence_index

    def set_finish_reason(self, finish_reason: str, sequence_index: int = 0) -> None:
        """Say what ended a sequence."""
        self.sequences[sequence_index].finish_reason = finish_reason

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        """Return the tokens of a sequence."""
        return self._shown(self.sequences[sequence_index].tokens)

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        """Return the tokens of the prompt."""
        return self._shown(self.prompt_tokens_details)

    def get_top_tokens_as_dict(self, sequence_index: int = 0) -> list[list[dict[str, Any]]]:
        """Return the most probable tokens of each step of a sequence."""
        return [self._shown(tokens) for tokens in self.sequences[sequence_index].top_tokens]

    def _shown(self, tokens: list[Token]) -> list[dict[str, Any]]:
        if getattr(self.input, "tgi_compat", False):
            return [token.as_tgi_dict() for token in tokens]
        return [token.as_dict() for token in tokens]
