"""One call of an ASGI application in process: a request in, an answer or a stream out."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, Self

from multidict import CIMultiDict

from lmi_vllm.engine.base import DirectEvents
from lmi_vllm.errors import EngineDeadError, EngineFailureError, Fault, LmiError
from lmi_vllm.messages import HttpCall, OpenAIReply

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Application = Callable[..., Awaitable[None]]
DISCONNECT_SECONDS: Final = 5.0  # for the handler to see a disconnect
_NOT_GIVEN_ON: Final = (b"content-length", b"transfer-encoding", b"connection", b"date", b"server")
# Bodies are decompressed before.
_NOT_HANDED_IN: Final = frozenset(
    {b"content-length", b"content-encoding", b"transfer-encoding", b"connection", b"host"}
)
_REQUEST_ID: Final = b"x-request-id"
_OURS: Final = _NOT_HANDED_IN | {_REQUEST_ID}
_ADAPTER: Final = b"x-amzn-sagemaker-adapter-identifier"  # read before; vLLM would put it in again


class Exchange(AsyncIterator[bytes]):
    """One call of the application: a task that gets the request and returns its answer.

    A chunk waits until the one before it is taken, so a slow reader slows the handler.
    """

    def __init__(
        self,
        app: Application,
        call: HttpCall,
        body: bytes,
        to_error: Callable[[BaseException], LmiError],
        direct: DirectEvents | None = None,
        renamed: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._renamed = renamed  # internal names, and the names that clients see
        self._to_error = to_error  # translates an error that ends a stream
        self._body: bytes | None = body
        self._direct = direct
        self._has_gone = asyncio.Event()
        self._start: Message | None = None
        self._message: Message | None = None  # the next message
        # Bare futures, each with one waiter: half the cost of an asyncio.Queue.
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._first = b""
        self._is_stream = self._is_over = self._is_closed = self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run(app, _scope(call, len(body))))

    async def _run(self, app: Application, scope: Message) -> None:
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            known = self._to_error(error)
            is_told = known.fault is Fault.CLIENT or isinstance(known, EngineDeadError)
            if not self._is_closed and not is_told:
                logger.exception("vLLM's application failed on %s", scope["path"])
            self._error = error
        self._has_ended = True
        _wake(self._reader)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._start is None:
            self._start = message
            return
        if self._renamed is not None and (body := message.get("body")):
            message = {**message, "body": bytes(body).replace(*self._renamed)}
        if self._goes_past(message):
            return
        while self._message is not None and not self._is_closed:
            self._writer = self._loop.create_future()
            await self._writer
        if self._is_closed:
            return
        self._message = message
        if self._is_stream or message.get("more_body"):
            _wake(self._reader)  # a whole answer waits for the end of the handler in any case

    def _goes_past(self, message: Message) -> bool:
        """Whether a chunk was written directly, so that the waiting reader does not get it."""
        direct = self._direct
        if direct is None or self._message is not None or not message.get("more_body"):
            return False
        if not direct.is_open or self._is_closed:
            return False
        if chunk := message.get("body"):
            direct.read_event(bytes(chunk))
        return True

    async def reply(self) -> OpenAIReply:
        """Return the answer once it is known to be whole or a stream."""
        body, start = await self._next(), self._start
        if start is None or start["type"] != "http.response.start":
            raise self._failure("vLLM's application gave no answer") from self._error
        headers = CIMultiDict(
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in start.get("headers", ())
                if name.lower() not in _NOT_GIVEN_ON
            ]
        )
        status, content_type = int(start["status"]), headers.pop("content-type", "")
        content = b"" if body is None else bytes(body.get("body", b""))
        # An answer with a length is whole although a middleware sends it in parts.
        is_whole = any(name.lower() == b"content-length" for name, _ in start.get("headers", ()))
        while body is not None and body.get("more_body") and is_whole:
            body = await self._next()
            content += b"" if body is None else bytes(body.get("body", b""))
        if body is None and self._error is not None:
            raise self._failure("vLLM's application gave no whole answer") from self._error
        if body is None or not body.get("more_body"):
            await self._task  # what the handler does after the answer belongs to it
            return OpenAIReply(status, content, content_type, headers=headers)
        self._is_stream, self._first = True, content
        return OpenAIReply(status, content_type=content_type, stream=self, headers=headers)

    def _failure(self, text: str) -> LmiError:
        known = None if self._error is None else self._to_error(self._error)
        return known if isinstance(known, EngineDeadError) else EngineFailureError(text)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        while not self._is_over:
            message = await self._next()
            if message is None:
                break
            self._is_over = not message.get("more_body")
            if chunk := message.get("body"):
                return bytes(chunk)
        await self._next()  # a middleware ends the answer first, and raises what failed then
        if self._error is not None:
            raise self._to_error(self._error) from self._error
        raise StopAsyncIteration

    async def _next(self) -> Message | None:
        """Return the next body message of the application; None after its return."""
        while self._message is None and not self._has_ended:
            self._reader = self._loop.create_future()
            await self._reader
        return self._take()

    def _take(self) -> Message | None:
        message, self._message = self._message, None
        _wake(self._writer)
        return message

    async def aclose(self) -> None:
        """Signal a disconnect to the handler, which aborts its requests in the engine."""
        self._is_closed = True
        # A handler that is cancelled while it sends leaves its generator, and so its request in the
        # engine, to the garbage collector. So it may return to where it waits for the next token.
        if self._take() is not None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        self._has_gone.set()
        await asyncio.wait([self._task], timeout=DISCONNECT_SECONDS)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def _scope(call: HttpCall, length: int) -> Message:
    left_out = _OURS if call.request_id else _NOT_HANDED_IN
    if call.adapter is not None:
        left_out |= {_ADAPTER}
    headers = [
        (name, value) for given, value in call.headers if (name := given.lower()) not in left_out
    ]
    headers.append((b"content-length", b"%d" % length))
    if call.request_id:
        headers.append((_REQUEST_ID, call.request_id.encode("latin-1", "replace")))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode("utf-8", "surrogateescape"),
        "query_string": call.query_string.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Return headers as ASGI has them, by lower-case name."""
    raw = []
    for name, value in headers.items():
        raw.append((name.encode("latin-1", "replace"), value.encode("latin-1", "replace")))
    return raw
