"""The user's input and output formatters around a request."""

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from lmi_vllm.errors import LmiError, StatusTable
from lmi_vllm.features.custom_code.calling import CodeCaller, error_row
from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.request_io import TextInput
from lmi_vllm.features.custom_code.functions import (
    HookContext,
    InputFunction,
    OutputFunction,
    new_body,
    new_payload,
)
from lmi_vllm.features.custom_code.rolling_batch import FORMATTER_FAILED, GIVEN_INPUT
from lmi_vllm.inference.request.body import decode_body, named_contents
from lmi_vllm.inference.response.openai_events import SSE_ERROR, error_of
from lmi_vllm.inference.response.streams import close_iterator
from lmi_vllm.messages import FRAMINGS, InferenceCall, OpenAIReply, Reply


# What vLLM's completion handler would take from the model's generation config if left out.
@dataclass(frozen=True, slots=True)
class InputFormatter:
    """Calls the user's function that turns a payload into another."""

    function: InputFunction
    caller: CodeCaller

    def undecoded(self, call: InferenceCall) -> Any:
        """Return a payload that only a formatter can read: bytes, or JSON that is no object.

        Raises:
            PayloadError: see `decode_body`.
        """
        if call.content_type and "json" not in call.content_type.lower():
            return {"inputs": call.body}
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(call.body)
        return decode_body(call.body, call.content_type)

    async def __call__(self, call: InferenceCall, payload: Any) -> dict[str, Any]:
        """Return the payload that the function makes of the request's.

        `payload` is the decoded one.

        Raises:
            CustomCodeError: it failed, or returned no payload.
        """
        context = _hook_context(self.caller, call, payload)
        if self.function.wants_input:
            contents = named_contents(call.body, call.content_type)
            context = _hook_context(self.caller, call, payload, self.caller.input(call, contents))
        made: dict[str, Any]
        made, text_input = await self.caller.call(
            FORMATTER_FAILED, _call_hook, self.function, (context,), _payload_and_input
        )
        GIVEN_INPUT.set((call, text_input))
        if text_input is not None and isinstance(payload, dict) and "stream" in payload:
            made["stream"] = payload["stream"]  # a TextInput has no place for it
        return made


@dataclass(frozen=True, slots=True)
class OutputFormatter:
    """Calls the user's function that makes the answer out of vLLM's."""

    function: OutputFunction
    caller: CodeCaller

    async def __call__(
        self, call: InferenceCall, payload: Any, answer: OpenAIReply, statuses: StatusTable
    ) -> Reply:
        """Return the answer that the function makes of vLLM's.

        Raises:
            CustomCodeError: it failed, or returned a value that JSON cannot hold.
        """
        context = _hook_context(self.caller, call, payload)
        if answer.stream is not None:
            kind = FRAMINGS["jsonlines"].content_type
            return Reply(200, kind, stream=self._json_lines(context, answer.stream, statuses))
        response = answer.response
        if response is None:  # vLLM wrote these bytes itself
            response = orjson.loads(answer.body)
        body = await self._format(response, context, new_body)
        return Reply(200, "application/json", body if body.endswith(b"\n") else body + b"\n")

    async def _json_lines(
        self, context: HookContext, events: AsyncIterator[bytes], statuses: StatusTable
    ) -> AsyncIterator[bytes]:
        """Yield a line for each of vLLM's events, and an empty one at the end."""
        try:
            async for event in events:
                if event.startswith(SSE_ERROR):
                    yield error_row(error_of(event.removeprefix(b"data: ")), statuses)
                    return
                line = await self._format(event.decode(), context, new_line)
                if line:
                    yield line + b"\n"
            yield b"\n"
        except LmiError as error:
            yield error_row(error, statuses)
        finally:
            await close_iterator(events)

    async def _format(
        self, response: Any, context: HookContext, read: Callable[[Any], bytes]
    ) -> bytes:
        made: bytes = await self.caller.call(
            FORMATTER_FAILED, _call_hook, self.function, (response, context), read
        )
        return made


def new_line(result: Any) -> bytes:
    """Return what an output hook made of a stream's event; b"" leaves the event out.

    Raises:
        HookError: JSON cannot hold it.
    """
    return b"" if result is None else new_body(result)


def _payload_and_input(result: Any) -> tuple[dict[str, Any], TextInput | None]:
    """Return the payload an input hook made, and the TextInput if it returned one."""
    return new_payload(result), result if isinstance(result, TextInput) else None


def _hook_context(
    caller: CodeCaller, call: InferenceCall, payload: Any, given: Input | None = None
) -> HookContext:
    return HookContext(payload, caller.tokenizer, call.body, call.content_type, call.accept, given)


async def _call_hook(
    function: InputFunction | OutputFunction,
    arguments: tuple[Any, ...],
    read: Callable[[Any], Any],
) -> Any:
    result: Any = function.call(*arguments)
    return read(await result if inspect.isawaitable(result) else result)
