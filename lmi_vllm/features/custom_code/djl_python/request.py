"""LMI's `request`: one request of a rolling batch, and its tokens as a formatter writes them.

A formatter has one of two signatures. The newer gets the whole `TextGenerationOutput` at each
token. The older gets `token, first_token, last_token, details, generated_text`, and the request's
number if it takes a sixth argument.
"""

import inspect
import json
from collections.abc import Callable
from typing import Any, Final

from lmi_vllm.features.custom_code.djl_python.request_io import (
    RequestInput,
    RequestOutput,
    TextGenerationOutput,
    Token,
)

OUTPUT_TYPES: Final = ("RequestOutput", "TextGenerationOutput")
LEGACY_ARGUMENTS: Final = (5, 6)
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def takes_request_output(parameters: list[inspect.Parameter]) -> bool:
    """Return whether a formatter's first argument is annotated as the newer signature's."""
    if not parameters:
        return False
    annotation = parameters[0].annotation
    if isinstance(annotation, str):
        return annotation.strip("'\"").rpartition(".")[2] in OUTPUT_TYPES
    return isinstance(annotation, type) and issubclass(annotation, RequestOutput)


def legacy_arguments(parameters: list[inspect.Parameter]) -> int:
    """Return with how many arguments the older signature is called; 0 for another signature."""
    required = [
        item
        for item in parameters
        if item.kind in _POSITIONAL and item.default is inspect.Parameter.empty
    ]
    return len(required) if len(required) in LEGACY_ARGUMENTS else 0


class Request:
    """One request, and the text of its next tokens."""

    def __init__(self, request_input: RequestInput) -> None:
        self.request_input = request_input
        self.id = request_input.request_id
        self.input_text = getattr(request_input, "input_text", "")
        self.adapter = getattr(request_input, "adapters", None)
        if not request_input.server_parameters:
            request_input.server_parameters = dict(request_input.parameters)
        self.parameters = request_input.server_parameters
        formatter = self.parameters.pop("output_formatter", request_input.output_formatter)
        is_streamed = bool(self.parameters.pop("stream", False))
        self.parameters.pop("details", None)
        self.output_formatter, self.content_type = _formatter(formatter, is_streamed=is_streamed)
        request_input.output_formatter = self.output_formatter
        parameters = [*inspect.signature(self.output_formatter).parameters.values()]
        self._arguments = 0 if takes_request_output(parameters) else legacy_arguments(parameters)
        self.legacy_formatter = bool(self._arguments)
        self.request_output = TextGenerationOutput(self.id, request_input)
        self.prompt_tokens = 0
        self.last_token = False
        self.next_token_str = ""
        self.error_message: str | None = None
        self.error_code: int | None = None

    def set_next_token(
        self, next_token: Token | str, last_token: bool = False, finish_reason: str | None = None
    ) -> None:
        """Append a token; `finish_reason` is that of the last one."""
        token = Token(-1, next_token) if isinstance(next_token, str) else next_token
        token.request_id = self.id
        self.request_output.set_next_token(
            token, is_last_token=last_token, finish_reason=finish_reason
        )
        self.last_token = self.request_output.finished = last_token

    def get_next_token(self) -> str:
        """Return what the formatter makes of the tokens since `reset_next_token`."""
        if not self.next_token_str:
            self.next_token_str = "".join(self._formatted())
        return self.next_token_str

    def reset_next_token(self) -> None:
        """Begin the next text."""
        self.next_token_str = ""

    def is_last_token(self) -> bool:
        """Return whether the last token was set."""
        return self.last_token

    def get_content_type(self) -> str | None:
        """Return the content type of the answer; None for a formatter of the user's."""
        return self.content_type

    def get_error_message(self) -> str | None:
        """Return why the request failed."""
        return self.error_message

    def get_error_code(self) -> int | None:
        """Return the HTTP status of a request that failed."""
        return self.error_code

    def set_error_message(self, error_message: str) -> None:
        """Set why the request failed."""
        self.error_message = error_message

    def set_error_code(self, code: int) -> None:
        """Set the HTTP status of a request that failed."""
        self.error_code = code

    def get_client_request_id(self) -> str | None:
        """Return the id that the client gave."""
        return self.request_input.client_request_id

    def _formatted(self) -> list[str]:
        output = self.request_output
        sequence = output.sequences[output.best_sequence_index]
        texts: list[str] = []
        while sequence.has_next_token():
            before = sequence._next
            texts.append(self._legacy() if self._arguments else self.output_formatter(output))
            if sequence._next == before:  # it reads the tokens itself: the next call has all
                break
        return [text for text in texts if text]

    def _legacy(self) -> str:
        output, given = self.request_output, self.request_input.parameters
        sequence = output.sequences[output.best_sequence_index]
        details: dict[str, Any] = {}
        if given.get("details"):
            details = {
                "finish_reason": sequence.finish_reason,
                "tokens": output.get_tokens_as_dict(output.best_sequence_index),
                "generated_tokens": len(sequence.tokens),
                "inputs": self.input_text,
                "parameters": given,
                "prompt_tokens": self.prompt_tokens or len(output.prompt_tokens_details),
            }
        elif sequence.finish_reason == "error":
            details = {"finish_reason": "error"}
        next_token = sequence.get_next_token()
        token, is_first, is_last = next_token[0], next_token[-2], next_token[-1]
        text = str(self.input_text) if given.get("return_full_text") else ""
        if is_last:
            text += "".join(each.text for each in sequence.tokens)
        arguments = (token, is_first, is_last, details, text, self.id)[: self._arguments]
        made: str = self.output_formatter(*arguments)
        return made


def _formatter(
    formatter: Callable[..., Any] | str | None, *, is_streamed: bool
) -> tuple[Callable[..., Any], str | None]:
    if callable(formatter):
        return formatter, None
    known: dict[str, tuple[Callable[..., Any], str]] = {
        "json": (_as_json, "application/json"),
        "jsonlines": (_as_line, "application/jsonlines"),
        "sse": (_as_event, "text/event-stream"),
    }
    return known.get(str(formatter), known["jsonlines" if is_streamed else "json"])


def _as_json(output: TextGenerationOutput) -> str:
    """Return the pieces of one JSON object."""
    sequence = output.sequences[output.best_sequence_index]
    token, *_, is_first, is_last = sequence.get_next_token()
    prompt = output.input.input_text if output.input.parameters.get("return_full_text") else ""
    begun = f'{{"generated_text": "{_inside(prompt)}' if is_first else ""
    piece = begun + _inside(token.text)
    if not is_last:
        return piece
    details = _details(output)
    ended = f'", "details": {json.dumps(details, ensure_ascii=False)}}}' if details else '"}'
    return piece + ended


def _as_line(output: TextGenerationOutput) -> str:
    sequence = output.sequences[output.best_sequence_index]
    token, *_, is_last = sequence.get_next_token()
    row: dict[str, Any] = {"token": token.as_dict()}
    if is_last:
        prompt = output.input.input_text if output.input.parameters.get("return_full_text") else ""
        row["generated_text"] = prompt + "".join(each.text for each in sequence.tokens)
        row |= {"details": found} if (found := _details(output)) else {}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _as_event(output: TextGenerationOutput) -> str:
    return f"data: {_as_line(output)}\n"


def _details(output: TextGenerationOutput) -> dict[str, Any]:
    if not output.input.parameters.get("details"):
        return {}
    sequence = output.sequences[output.best_sequence_index]
    return {
        "finish_reason": sequence.finish_reason,
        "generated_tokens": len(sequence.tokens),
        "inputs": output.input.input_text,
        "tokens": output.get_tokens_as_dict(output.best_sequence_index),
    }


def _inside(text: str) -> str:
    """Return a text as inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
