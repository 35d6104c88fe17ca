"""The user's own `handle`, which answers requests instead of the built-in handler."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.errors import CustomCodeError, LmiError, StatusTable
from lmi_vllm.extras.custom_code.calling import CodeCaller, error_row, failure
from lmi_vllm.extras.custom_code.djl_python.content import Output
from lmi_vllm.inference.response.streams import SilenceLimit, close_iterator
from lmi_vllm.messages import FRAMINGS, InferenceCall, Reply

HANDLER_FAILED: Final = "Custom handler failed"
_JSONLINES: Final = FRAMINGS["jsonlines"].content_type
# Set by the server itself; a handler's properties cannot override them.
_NOT_HEADERS: Final = frozenset(
    {"content-type", "content-length", "transfer-encoding", "connection"}
)


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
        await self.caller.call(
            HANDLER_FAILED, self.function, self.caller.input(InferenceCall(b""), {})
        )

    async def __call__(self, call: InferenceCall, statuses: StatusTable) -> Reply | None:
        """Return the handler's reply; None leaves the request to the built-in handler.

        Its input holds the query parameters as content, then the body.

        Raises:
            CustomCodeError: the handler failed, or returned an unusable value.
        """
        content = {name: value.encode() for name, value in call.query.items()}
        given = self.caller.input(call, {**content, "data": call.body})
        result = await self.caller.call(HANDLER_FAILED, self.function, given)
        if result is None:
            return None
        if isinstance(result, Output):
            return _reply(result)
        if hasattr(result, "__anext__") or hasattr(result, "__next__"):
            return await self._streamed(result, statuses)
        raise _not_output(result)

    async def _streamed(self, outputs: Any, statuses: StatusTable) -> Reply:
        """Return a handler's generator as a stream; the first piece decides status and headers."""
        pieces = self.caller.thread.iterate(outputs)
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
        if piece is not None and not isinstance(piece, Output):
            raise _not_output(piece)
        return piece


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


async def _next_within(items: AsyncIterator[Any], seconds: float, setting: str) -> Any:
    """Return the next item, None at the end; see `SilenceLimit.next`."""
    limit = SilenceLimit(seconds, setting)
    try:
        return await limit.next(items)
    finally:
        limit.close()
