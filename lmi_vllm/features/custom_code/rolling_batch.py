"""Output formatters that were written for LMI's rolling batch: called for each token."""

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.features.custom_code.calling import CodeCaller
from lmi_vllm.features.custom_code.djl_python.request import Request
from lmi_vllm.features.custom_code.djl_python.request_io import Sequence as TokenSequence
from lmi_vllm.features.custom_code.djl_python.request_io import TextInput, Token
from lmi_vllm.features.custom_code.functions import HookError, TokenFunction
from lmi_vllm.inference.response.formatters import finish_reason
from lmi_vllm.messages import GeneratedToken, GenerationChunk, InferenceCall, TokenLogprob

FORMATTER_FAILED: Final = "Custom formatter failed"
# What the input formatter returned for a call, if it was a TextInput, which may have more fields.
# The call is kept with it, since one task may serve several requests of a connection.
GIVEN_INPUT: Final[ContextVar[tuple[InferenceCall, TextInput | None] | None]] = ContextVar(
    "lmi_vllm_text_input", default=None
)


@dataclass(frozen=True, slots=True)
class TokenFormatter:
    """Calls the user's formatter for each token, and joins what it returns."""

    function: TokenFunction
    caller: CodeCaller
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def whole(
        self,
        call: InferenceCall,
        payload: Mapping[str, Any],
        prompt: str,
        sequences: Sequence[GenerationChunk],
    ) -> bytes:
        """Return what the formatter writes for one prompt.

        Raises:
            CustomCodeError: it failed.
        """
        request = await self._request(call, payload, prompt, is_streaming=False)
        best, *others = sequences
        if others:
            return await self._call(_write_several, request, self.function, sequences)
        return await self._call(_write, request, best)

    async def rows(
        self,
        call: InferenceCall,
        payload: Mapping[str, Any],
        prompt: str,
        chunks: AsyncIterator[GenerationChunk],
    ) -> AsyncIterator[bytes]:
        """Yield what the formatter writes for each chunk of a stream.

        Raises:
            CustomCodeError: it failed.
        """
        request = await self._request(call, payload, prompt, is_streaming=True)
        async for chunk in chunks:
            if row := await self._call(_write, request, chunk):
                yield row

    async def _request(
        self, call: InferenceCall, payload: Mapping[str, Any], prompt: str, *, is_streaming: bool
    ) -> Request:
        given = _given_input(call)
        given.request_id, given.client_request_id = next(self._numbers), call.request_id
        given.input_text, given.output_formatter = prompt, self.function.function
        given.tokenizer, given.adapters = self.caller.tokenizer, payload.get("adapters") or None
        if not given.parameters:
            given.parameters = dict(payload.get("parameters") or {})
        if not callable(given.parameters.get("output_formatter")):  # a client cannot choose it
            given.parameters.pop("output_formatter", None)
        given.parameters["stream"] = is_streaming
        request: Request = await self.caller.call(FORMATTER_FAILED, Request, given)
        best = request.request_output.sequences[0]
        best.values_of_next = self.function.values_of_next
        return request

    async def _call(self, write: Any, *arguments: Any) -> bytes:
        made: bytes = await self.caller.call(FORMATTER_FAILED, write, *arguments)
        return made


def _given_input(call: InferenceCall) -> TextInput:
    """Return the TextInput that the input formatter made for this call, or a new one."""
    found = GIVEN_INPUT.get()
    made = found[1] if found is not None and found[0] is call else None
    return TextInput() if made is None else made


def _write(request: Request, chunk: GenerationChunk) -> bytes:
    """Return what the formatter writes for the tokens of a chunk, one after the other."""
    output = request.request_output
    if chunk.prompt_logprobs and not output.prompt_tokens_details:
        output.prompt_tokens_details += _others(chunk.prompt_logprobs)
    request.prompt_tokens = chunk.prompt_tokens
    ends = chunk.finish_reason is not None
    tokens: Sequence[GeneratedToken | None] = chunk.tokens
    if ends and not tokens:  # aborted: the formatter still has to see the end
        tokens = (None,)
    written = []
    for position, token in enumerate(tokens, start=1):
        is_last = ends and position == len(tokens)
        if token is not None and token.top:
            output.set_next_top_tokens(_others(token.top), 0)
        new = Token(-1, "") if token is None else _token(token)
        request.set_next_token(new, is_last, finish_reason(chunk) if is_last else None)
        written.append(_as_bytes(request.get_next_token()))
        request.reset_next_token()
    return b"".join(written)


def _write_several(
    request: Request, function: TokenFunction, sequences: Sequence[GenerationChunk]
) -> bytes:
    """Return what the formatter writes for several candidates: it is called once, at the end."""
    output = request.request_output
    for index, chunk in enumerate(sequences):
        kept = TokenSequence(values_of_next=function.values_of_next)
        kept.tokens = [_token(token) for token in chunk.tokens]
        kept.top_tokens = [_others(token.top) for token in chunk.tokens if token.top]
        kept.cumulative_log_prob = chunk.cumulative_logprob or 0.0
        kept.finish_reason = finish_reason(chunk)
        kept._last_token_index = len(kept.tokens) - 1 if kept.tokens else None
        output.sequences[index] = kept
    output.other_sequences_indices = [*range(1, len(sequences))]
    output.finished = request.last_token = True
    if request.legacy_formatter:  # it knows of one sequence
        return _as_bytes(request.get_next_token())
    return _as_bytes(function.function(output))


def _token(token: GeneratedToken) -> Token:
    return Token(token.id, token.text, token.logprob, token.is_special or None)


def _others(tokens: Sequence[TokenLogprob]) -> list[Token]:
    return [Token(item.id, item.text, item.logprob) for item in tokens]


def _as_bytes(written: Any) -> bytes:
    if isinstance(written, str):
        return written.encode()
    if isinstance(written, bytes | bytearray):
        return bytes(written)
    raise HookError(f"the output formatter returned {type(written).__name__}, expected text")
