"""The user's code around requests: handler, input hook, output hook."""

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson

from lmi_vllm.errors import AdapterRefusedError, CustomCodeError, Dialect, LmiError, StatusTable
from lmi_vllm.inference.hooks.functions import (
    NO_HOOKS,
    Hooked,
    Hooks,
    InputHook,
    OutputHook,
    new_body,
    new_payload,
)
from lmi_vllm.inference.hooks.inputs import Input
from lmi_vllm.inference.hooks.loading import CODE_FILE, CodeError, load_adapter_code
from lmi_vllm.inference.hooks.outputs import Output
from lmi_vllm.inference.hooks.thread import CodeThread
from lmi_vllm.inference.response.formatters import FRAMINGS, lmi_error
from lmi_vllm.inference.response.openai_events import SSE_ERROR, error_of
from lmi_vllm.inference.response.streams import close_iterator, deadline, next_within
from lmi_vllm.messages import InferenceCall, OpenAIReply, Reply

logger = logging.getLogger(__name__)

HANDLER_FAILED: Final = "Custom handler failed"
FORMATTER_FAILED: Final = "Custom formatter failed"
_JSONLINES: Final = FRAMINGS["jsonlines"].content_type
# What HTTP itself decides about an answer; a handler's properties cannot.
_NOT_HEADERS: Final = frozenset(
    {"content-type", "content-length", "transfer-encoding", "connection"}
)


class CustomCode:
    """All code of one model: the base hooks, and what adapters bring is loaded here.

    `properties` are the model's options, which a handler finds among a request's. `tokenizer` is
    the hooks' own copy. With `allows_adapters` false an adapter's file is left alone.
    """

    def __init__(
        self,
        hooks: Hooks = NO_HOOKS,
        *,
        thread: CodeThread | None = None,
        tokenizer: object = None,
        properties: Mapping[str, str] = MappingProxyType({}),
        allows_adapters: bool = True,
        timeout_seconds: float = 240.0,
    ) -> None:
        self.hooks = hooks
        self._thread = thread or CodeThread()
        self._tokenizer = tokenizer
        self._properties = properties
        self._allows_adapters = allows_adapters
        self._timeout_seconds = timeout_seconds

    async def load_adapter(self, name: str, path: str) -> Hooks:
        """Return the hooks that the adapter brings; none without a file, or where code is off.

        Raises:
            AdapterRefusedError: its file cannot be loaded.
        """
        if not (Path(path) / CODE_FILE).is_file():
            return NO_HOOKS
        if not self._allows_adapters:
            logger.warning("adapter %s: its %s is not loaded (LMI_CUSTOM_CODE)", name, CODE_FILE)
            return NO_HOOKS
        try:
            hooks: Hooks = await self._thread.run(load_adapter_code, Path(path))
        except CodeError as error:
            raise AdapterRefusedError(
                f"Adapter {name}: its custom code cannot be loaded: {error}"
            ) from error
        return hooks

    async def call_handler_at_start(self) -> None:
        """Give the handler its first call, with an empty input; its failure is only logged."""
        if self.hooks.handle is None:
            return
        try:
            await self._run(HANDLER_FAILED, self.hooks.handle, self._input(InferenceCall(b""), {}))
        except LmiError as error:
            logger.warning("the handler's first call, with an empty input: %s", error.text)

    async def handle(self, call: InferenceCall, statuses: StatusTable) -> Reply | None:
        """Return what the user's own handler answers; None is for the built-in one to answer.

        It finds query parameters as content, then the body.

        Raises:
            CustomCodeError: it failed.
        """
        if self.hooks.handle is None:
            return None
        content = {name: value.encode() for name, value in call.query.items()}
        given = self._input(call, {**content, "data": call.body})
        result = await self._run(HANDLER_FAILED, self.hooks.handle, given)
        if result is None:
            return None
        if isinstance(result, Output):
            return _reply(result)
        if hasattr(result, "__anext__") or hasattr(result, "__next__"):
            return await self._streamed(result, statuses)
        raise _not_output(result)

    async def format_input(self, hook: InputHook, call: InferenceCall, payload: Any) -> Any:
        """Return the payload that the input hook makes of the request's.

        Raises:
            CustomCodeError: it failed, or returned no payload.
        """
        told = self._told(call, payload)
        if hook.wants_input:
            told = self._told(call, payload, self._input(call, {"data": call.body}))
        return await self._run(FORMATTER_FAILED, _called, hook, (told,), new_payload)

    async def format_output(
        self,
        hook: OutputHook,
        call: InferenceCall,
        payload: Any,
        answer: OpenAIReply,
        statuses: StatusTable,
    ) -> Reply:
        """Return the answer that the output hook makes of vLLM's.

        Raises:
            CustomCodeError: it failed, or returned what has no JSON.
        """
        told = self._told(call, payload)
        if answer.stream is not None:
            return Reply(200, _JSONLINES, stream=self._lines(hook, told, answer.stream, statuses))
        response = answer.response
        if response is None:  # vLLM wrote these bytes itself
            response = orjson.loads(answer.body)
        body = await self._run(FORMATTER_FAILED, _called, hook, (response, told), new_body)
        return Reply(200, "application/json", body if body.endswith(b"\n") else body + b"\n")

    async def _lines(
        self, hook: OutputHook, told: Hooked, events: AsyncIterator[bytes], statuses: StatusTable
    ) -> AsyncIterator[bytes]:
        """Yield a line for each of vLLM's events, and an empty one at the end."""
        try:
            async for event in events:
                if event.startswith(SSE_ERROR):
                    yield _error_row(error_of(event.removeprefix(b"data: ")), statuses)
                    return
                text = event.decode()
                line = await self._run(FORMATTER_FAILED, _called, hook, (text, told), new_line)
                if line:
                    yield line + b"\n"
            yield b"\n"
        except LmiError as error:
            yield _error_row(error, statuses)
        finally:
            await close_iterator(events)

    async def _streamed(self, outputs: Any, statuses: StatusTable) -> Reply:
        """Return a handler's generator as a stream; the first piece decides status and headers."""
        pieces = self._thread.iterate(outputs)
        try:
            first = await self._piece(pieces)
        except BaseException:
            await close_iterator(pieces)
            raise
        if first is None:
            return Reply(200, _JSONLINES)
        return _reply(first, self._pieces(first, pieces, statuses), _JSONLINES)

    async def _pieces(
        self, first: Output, pieces: AsyncIterator[Any], statuses: StatusTable
    ) -> AsyncIterator[bytes]:
        piece: Output | None = first
        try:
            while piece is not None:
                yield _content(piece)
                piece = await self._piece(pieces)
        except LmiError as error:
            yield _error_row(error, statuses)
        finally:
            await close_iterator(pieces)

    async def _piece(self, pieces: AsyncIterator[Any]) -> Output | None:
        try:
            piece = await next_within(pieces, self._timeout_seconds, "predict_timeout")
        except LmiError:
            raise
        except Exception as error:
            raise _failed(HANDLER_FAILED, error) from error
        if piece is not None and not isinstance(piece, Output):
            raise _not_output(piece)
        return piece

    async def _run(self, failed: str, function: Callable[..., Any], *arguments: Any) -> Any:
        async with deadline(self._timeout_seconds, "predict_timeout"):
            try:
                return await self._thread.run(function, *arguments)
            except Exception as error:
                raise _failed(failed, error) from error

    def _told(self, call: InferenceCall, payload: Any, given: Input | None = None) -> Hooked:
        return Hooked(payload, self._tokenizer, call.body, call.content_type, call.accept, given)

    def _input(self, call: InferenceCall, content: Mapping[str, bytes]) -> Input:
        given = Input()
        given.properties = {**self._properties, **call.properties}
        if call.content_type:
            given.properties["Content-Type"] = call.content_type
        for key, value in content.items():
            given.content.add(key, value)
        return given


def new_line(result: Any) -> bytes:
    """Return what an output hook made of a stream's event; None and "" are for it to be left out.

    Raises:
        HookError: it has no JSON.
    """
    return b"" if result is None else new_body(result)


async def _called(
    hook: InputHook | OutputHook, arguments: tuple[Any, ...], read: Callable[[Any], Any]
) -> Any:
    result: Any = hook.call(*arguments)
    return read(await result if inspect.isawaitable(result) else result)


def _failed(what: str, error: Exception) -> CustomCodeError:
    logger.error("%s", what, exc_info=error)
    return CustomCodeError(f"{what}: {error or type(error).__name__}")


def _not_output(value: Any) -> CustomCodeError:
    return CustomCodeError(
        f"{HANDLER_FAILED}: it returned {type(value).__name__}, expected an Output, an async "
        "generator of Outputs, or None"
    )


def _reply(
    output: Output, stream: AsyncIterator[bytes] | None = None, kind: str = "application/json"
) -> Reply:
    names = {name.lower(): value for name, value in output.properties.items()}
    headers = {
        name: str(value)
        for name, value in output.properties.items()
        if name.lower() not in _NOT_HEADERS
    }
    body = b"" if stream is not None else _content(output)
    return Reply(output.code, str(names.get("content-type", kind)), body, stream, headers)


def _content(output: Output) -> bytes:
    return b"".join(output.content.get_values())


def _error_row(error: LmiError, statuses: StatusTable) -> bytes:
    """Return LMI's last row of a stream that failed."""
    return FRAMINGS["jsonlines"].frame(lmi_error(error.text, statuses.of(error, Dialect.LMI)))
