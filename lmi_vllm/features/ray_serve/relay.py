"""The relay of a replica: an ASGI application that passes requests to the server's Unix socket.

Bytes go through as they come, in both directions. It knows no route, so every dialect is the
server's own.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

from lmi_vllm.features.ray_serve.server_connection import ServerConnection, ServerGoneError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MODEL_ID_HEADER: Final = b"serve_multiplexed_model_id"  # Ray's own, for the way to the replica
# Of one connection (RFC 9110, 7.6.1).
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
     b"upgrade", b"expect"}
)  # fmt: skip
_NOT_PASSED_ON: Final = _HOP_BY_HOP | {MODEL_ID_HEADER}
# Ray's HTTP server writes its own of these, so that the client would get both.
_OF_THE_SERVER: Final = _HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
# As the server has it for an answer that it cannot give now.
_GONE: Final = json.dumps({"error": "the server of this replica does not answer", "code": 503})
_LINE_BREAK: Final = json.dumps(
    {"error": "a line break in the target or a header of the request", "code": 400}
)
_RETRY: Final = (b"retry-after", b"1")


class Relay:
    """Passes requests to the server behind a Unix socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._free: list[ServerConnection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the server's own answer; 0 where there is none."""
        try:
            connection = await self._connect()
            try:
                connection.begin(
                    f"GET {path} HTTP/1.1\r\nhost: server\r\n\r\n".encode(), b"",
                    is_head_request=False,
                )  # fmt: skip
                await connection.read_head()
                body, is_last = b"", False
                while not is_last:
                    piece, is_last = await connection.read_piece()
                    body += piece
                return connection.status, body
            finally:
                connection.close()
        except OSError as error:
            return 0, f"{self._socket}: {error}".encode()

    async def close(self) -> None:
        """Close its connections."""
        while self._free:
            self._free.pop().close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer as an ASGI application does; the server has no WebSockets."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _connect(self) -> ServerConnection:
        while self._free:
            connection = self._free.pop()
            if connection.may_be_used():
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        return (await loop.create_unix_connection(ServerConnection, self._socket))[1]

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = _Request(scope, await receive(), receive)
        if request.has_left:
            return
        if not request.is_sound:
            await _refuse(send, 400, _LINE_BREAK)
            return
        try:
            connection = await self._connect()
        except OSError:
            await _refuse(send, 503, _GONE, _RETRY)
            return
        # Ray cancels this call when its client disconnects; other ASGI servers send a message.
        sending = request.begin(connection)
        try:
            await _pass_answer_on(connection, send)
        except ServerGoneError:
            if request.has_left:
                return
            if connection.status:  # the client must not take what there is for all of it
                raise
            await _refuse(send, 503, _GONE, _RETRY)
        finally:
            sending.cancel()
            if connection.is_free():
                self._free.append(connection)
            else:
                connection.close()


async def _pass_answer_on(connection: ServerConnection, send: Send) -> None:
    await connection.read_head()
    kept = [header for header in connection.headers if header[0] not in _OF_THE_SERVER]
    await send({"type": "http.response.start", "status": connection.status, "headers": kept})
    is_last = False
    while not is_last:
        piece, is_last = await connection.read_piece()
        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})


class _Request:
    """A request: its first part is sent at once, the rest as it comes."""

    def __init__(self, scope: Mapping[str, Any], first: Message, receive: Receive) -> None:
        self._method, self._first, self._receive = scope["method"], first, receive
        self.has_left = first["type"] == "http.disconnect"
        self._is_whole = not first.get("more_body", False)
        names = {name for name, _ in scope["headers"]}
        has_body = not self._is_whole or bool(first.get("body"))
        # Of both, only the coding counts (RFC 9112, 6.3).
        is_coded = b"content-length" not in names or b"transfer-encoding" in names
        self._is_chunked = has_body and is_coded
        dropped = _NOT_PASSED_ON | {b"content-length"} if is_coded else _NOT_PASSED_ON
        lines = [f"{self._method} {_target(scope)} HTTP/1.1".encode("latin-1")]
        lines += [n + b": " + value for n, value in scope["headers"] if n not in dropped]
        if b"host" not in names:
            lines.append(b"host: server")  # as HTTP/1.0 may be sent
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked")
        self._head = b"\r\n".join(lines) + b"\r\n\r\n"
        # A line break in a name that Ray's proxy was told would be another header here.
        self.is_sound = self._head.count(b"\n") == self._head.count(b"\r") == len(lines) + 1
        # Bytes of the body to send: what is above its length would be a request of its own.
        self._left = 0 if is_coded else _length(scope["headers"])

    def begin(self, connection: ServerConnection) -> "asyncio.Task[None]":
        """Send what there is; the task sends the rest, and closes when the client has left."""
        is_head_request = self._method == "HEAD"
        connection.begin(self._head, self._framed(self._first), is_head_request=is_head_request)
        connection.is_sent = self._is_sent_with(self._first)
        return asyncio.ensure_future(self._follow(connection))

    async def _follow(self, connection: ServerConnection) -> None:
        is_whole = self._is_whole
        try:
            while (message := await self._receive())["type"] != "http.disconnect":
                if not is_whole:
                    await connection.send_more(self._framed(message))
                    is_whole = not message.get("more_body", False)
                    connection.is_sent = self._is_sent_with(message)
        except Exception:
            connection.close()  # the server would wait for the rest
            raise
        self.has_left = True
        connection.close()

    def _is_sent_with(self, message: Message) -> bool:
        """Whether the body is whole with this part, and as long as its header says."""
        return not message.get("more_body", False) and not self._left

    def _framed(self, message: Message) -> bytes:
        body: bytes = message.get("body", b"")
        if not self._is_chunked:
            body = body[: self._left]
            self._left -= len(body)
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk if message.get("more_body", False) else chunk + b"0\r\n\r\n"


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the length of the body; 0 where it is no number, which the server refuses."""
    value = next(value for name, value in headers if name == b"content-length")
    return int(value) if value.isdigit() else 0


def _target(scope: Mapping[str, Any]) -> str:
    """Return path and query without the prefix under which Ray serves the application."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    path = path.removeprefix(scope.get("root_path", "")) or "/"
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


async def _refuse(send: Send, status: int, body: str, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", b"application/json"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode(), "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
