"""The user's own `handle`, which answers requests instead of the built-in handler."""

import contextlib
import functools
import logging
import operator
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.errors import CustomCodeError, LmiError, StatusTable
from lmi_vllm.features.custom_code.calling import CodeCaller, error_row, failure
from lmi_vllm.features.custom_code.djl_python.inputs import Input
from lmi_vllm.features.custom_code.djl_python.outputs import Encoded, Output
from lmi_vllm.inference.request.body import named_contents
from lmi_vllm.inference.response.streams import SilenceLimit, close_iterator
from lmi_vllm.messages import FRAMINGS, InferenceCall, Reply

logger = logging.getLogger(__name__)

HANDLER_FAILED: Final = "Custom handler failed"
_BATCH: Final = "batch_0_"  # begins properties of a batch's first request, the only one here
_JSONLINES: Final = FRAMINGS["jsonlines"].content_type
# Set by the server itself; a handler's properties cannot override them.
_NOT_HEADERS: Final = frozenset(
    {"content-type", "content-length", "transfer-encoding", "connection"}
)
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_ENDS: Final = frozenset("\r\n\0")
_STATUSES: Final = range(200, 600)
_END: Final = object()  # of an iterator, whose items may be None


@dataclass(frozen=True, slots=True)
class Handler:
    """Calls the user's handler and makes a reply of what it returns."""

    function: Callable[..., Any]
    caller: CodeCaller

    async def call_at_start(self) -> None:
        """Call the handler once with an empty input, as LMI does at the start.

        Raises:
            LmiError: the handler failed, or took too long.
        """
        await self.caller.call(HANDLER_FAILED, self.function, self.caller.input(InferenceCall(b"")))

    async def __call__(self, call: InferenceCall, statuses: StatusTable) -> Reply | None:
        """Return the handler's reply; None leaves the request to the built-in handler.

        Its input holds the query parameters as content, then the body or a form's fields.

        Raises:
            CustomCodeError: the handler failed, or returned an unusable value.
            PayloadError: the body is a form that cannot be read.
        """
        query = [(name, value.encode()) for name, value in call.query.items()]
        given = self.caller.input(call, [*query, *named_contents(call.body, call.content_type)])
        result = await self.caller.call(HANDLER_FAILED, self.function, given)
        if result is None:
            return None
        if isinstance(result, Output):
            return await self._whole(result, given, statuses)
        if hasattr(result, "__anext__") or hasattr(result, "__next__"):
            return await self._streamed(result, given, statuses)
        raise _not_output(result)

    async def _whole(self, output: Output, given: Input, statuses: StatusTable) -> Reply:
        """Return the answer of one Output: its content, or its own stream."""
        if output.stream_content is None:
            reply = _reply(output, given)
            await self.caller.call(HANDLER_FAILED, output.execute_finalize)
            return reply
        stream = self._stream_content(output, statuses)
        return _reply(output, given, stream, _JSONLINES)

    async def _stream_content(self, output: Output, statuses: StatusTable) -> AsyncIterator[bytes]:
        """Yield the items of `add_stream_content`, each as the handler's formatter writes it."""
        items = self.caller.thread.iterate(output.stream_content)
        seconds, call = self.caller.timeout_seconds, self.caller.call
        try:
            while (item := await _next_within(items, seconds, "predict_timeout")) is not _END:
                yield await call(HANDLER_FAILED, output.streamed, item)
        except LmiError as error:
            yield error_row(error, statuses)
        except Exception as error:  # noqa: BLE001 (user code)
            yield error_row(failure(HANDLER_FAILED, error), statuses)
        finally:
            await close_iterator(items)
            with contextlib.suppress(LmiError):  # it is in the log, and the answer is complete
                await call(HANDLER_FAILED, output.execute_finalize)

    async def _streamed(self, outputs: Any, given: Input, statuses: StatusTable) -> Reply:
        """Return a handler's generator as a stream; the first piece decides status and headers."""
        pieces = self.caller.thread.iterate(outputs)
        try:
            first = await self._piece(pieces)
            if first is None:
                return Reply(200, _JSONLINES)
            return _reply(first, given, self._pieces(first, pieces, statuses), _JSONLINES)
        except BaseException:
            await close_iterator(pieces)
            raise

    async def _pieces(
        self, first: Output, pieces: AsyncIterator[Any], statuses: StatusTable
    ) -> AsyncIterator[bytes]:
        piece: Output | None = first
        try:
            while piece is not None:
                yield _content(piece)
                piece = await self._piece(pieces)
        except LmiError as error:
            yield error_row(error, statuses)
        finally:
            await close_iterator(pieces)

    async def _piece(self, pieces: AsyncIterator[Any]) -> Output | None:
        try:
            piece = await _next_within(pieces, self.caller.timeout_seconds, "predict_timeout")
        except LmiError:
            raise
        except Exception as error:
            raise failure(HANDLER_FAILED, error) from error
        if piece is _END:
            return None
        if not isinstance(piece, Output):
            raise _not_output(piece)
        return piece


def _not_output(value: Any) -> CustomCodeError:
    return CustomCodeError(
        f"{HANDLER_FAILED}: it returned {type(value).__name__}, expected an Output, an async "
        "generator of Outputs, or None"
    )


def _reply(
    output: Output,
    given: Input,
    stream: AsyncIterator[bytes] | None = None,
    kind: str = "application/json",
) -> Reply:
    properties = {name.removeprefix(_BATCH): value for name, value in output.properties.items()}
    names = {name.lower(): value for name, value in properties.items()}
    headers = {
        name: str(value)
        for name, value in properties.items()
        if name.lower() not in _NOT_HEADERS and not _is_copied(name, value, given)
    }
    kind = str(names.get("content-type", kind))
    _check_headers({**headers, "Content-Type": kind})
    body = b"" if stream is not None else _content(output)
    return Reply(_code(output), kind, body, stream, headers)


def _check_headers(headers: Mapping[str, str]) -> None:
    """Check that HTTP can carry the headers; a broken one would end the connection.

    Raises:
        CustomCodeError: names the property.
    """
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_ENDS.isdisjoint(value):
            raise CustomCodeError(
                f"{HANDLER_FAILED}: its Output has the property {name!r}, whose name or value "
                "cannot be a header"
            )


def _is_copied(name: str, value: object, given: Input) -> bool:
    """Whether a handler gave back a property of its request: an option, or a header of no use.

    LMI's examples copy all of them. Options may be secrets, and the client's Host or
    Accept-Encoding would make a broken answer.
    """
    return not name.lower().startswith("x-") and given.properties.get(name) == value


def _code(output: Output) -> int:
    """Return the HTTP status of an answer, which `binary_encode` may have been given.

    Raises:
        CustomCodeError: it is none of an answer; a client waits for one after 100 to 199.
    """
    codes = (value.code for value in output.content.get_values() if isinstance(value, Encoded))
    code: Any = next((code for code in codes if code is not None), output.code)
    with contextlib.suppress(TypeError):
        if (status := operator.index(code)) in _STATUSES:
            return status
    raise CustomCodeError(
        f"{HANDLER_FAILED}: its Output has the code {code!r}, expected 200 to 599"
    )


def _content(output: Output) -> bytes:
    """Return the content that is called `data`, or the first: LMI's front end sends no others."""
    content = output.content
    if content.is_empty():
        return b""
    value = content.get("data")
    if value is None:
        value = content.value_at(0)
    if content.size() > 1:
        _warn_of_unsent(content.size())
    return bytes(value.content if isinstance(value, Encoded) else value)


@functools.cache
def _warn_of_unsent(count: int) -> None:
    logger.warning(
        "the handler's Output has %d contents; as in LMI the one called data is sent, or the first",
        count,
    )


async def _next_within(items: AsyncIterator[Any], seconds: float, setting: str) -> Any:
    """Return the next item, `_END` at the end; see `SilenceLimit.within`."""
    limit = SilenceLimit(seconds, setting)
    try:
        return await limit.within(anext(items, _END))
    finally:
        limit.close()
