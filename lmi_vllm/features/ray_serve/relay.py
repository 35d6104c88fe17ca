"""The relay of a replica: an ASGI application that passes requests to the server's Unix socket.

Bytes go through as they come, in both directions. It knows no route, so every dialect is the
server's own.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import aiohttp
from yarl import URL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Of one connection (RFC 9110, 7.6.1); aiohttp writes its own.
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
     b"upgrade", b"expect"}
)  # fmt: skip
# Ray's HTTP server writes its own of these, so that the client would get both.
_OF_THE_SERVER: Final = _HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
_ORIGIN: Final = "http://server"  # the name is not looked up
# As the server has it for an answer that it cannot give now.
_GONE: Final = json.dumps({"error": "the server of this replica does not answer", "code": 503})


class Relay:
    """Passes requests to the server behind a Unix socket."""

    def __init__(self, socket: str) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(socket, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # the server has its own limits
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the server's own answer; 0 where there is none."""
        try:
            async with self._session.get(f"{_ORIGIN}{path}") as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            return 0, str(error).encode()

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer as an ASGI application does; the server has no WebSockets."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        body = _RelayedBody(await receive(), receive)
        asked = asyncio.ensure_future(self._pass_on(scope, body, send))
        # Ray cancels this call when its client disconnects; other ASGI servers send a message.
        leaving = asyncio.ensure_future(body.client_left())
        try:
            await asyncio.wait((asked, leaving), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                asked.result()
        finally:
            for task in (asked, leaving):
                task.cancel()
            await asyncio.gather(asked, leaving, return_exceptions=True)

    async def _pass_on(self, scope: Mapping[str, Any], body: "_RelayedBody", send: Send) -> None:
        try:
            answer = await self._session.request(
                scope["method"],
                URL(_ORIGIN + _target(scope), encoded=True),
                headers=_kept(scope["headers"], _HOP_BY_HOP),
                data=body.data(),
                allow_redirects=False,
            )
        except aiohttp.ClientError:
            await _refuse(send)
            return
        async with answer:
            await send(
                {
                    "type": "http.response.start",
                    "status": answer.status,
                    "headers": [
                        (name.lower(), value)
                        for name, value in answer.raw_headers
                        if name.lower() not in _OF_THE_SERVER
                    ],
                }
            )
            # An error here cuts the answer: the client must not take what there is for all of it.
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _RelayedBody:
    """The body of a request, read while it is passed on, and the client's end after it."""

    def __init__(self, first: Message, receive: Receive) -> None:
        self._first = first
        self._receive = receive
        self._is_read = asyncio.Event()
        self._has_left = first["type"] == "http.disconnect"
        if not first.get("more_body", False):
            self._is_read.set()

    def data(self) -> bytes | AsyncIterator[bytes] | None:
        """Return what aiohttp sends: all of it where it came in one piece."""
        if self._is_read.is_set():
            return self._first.get("body") or None
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        message = self._first
        while True:
            yield message.get("body", b"")
            if not message.get("more_body", False):
                break
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._has_left = True
                break
        self._is_read.set()

    async def client_left(self) -> None:
        """Return when the client has gone away."""
        await self._is_read.wait()
        while not self._has_left:
            self._has_left = (await self._receive())["type"] == "http.disconnect"


def _target(scope: Mapping[str, Any]) -> str:
    """Return path and query without the prefix under which Ray serves the application."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    path = path.removeprefix(scope.get("root_path", "")) or "/"
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _kept(headers: list[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[str, str]]:
    # Bytes that are no UTF-8 become question marks, as in the server's `request_properties`.
    return [
        (name.decode("latin-1"), value.decode("utf-8", "replace").replace("\ufffd", "?"))
        for name, value in headers
        if name.lower() not in dropped
    ]


async def _refuse(send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _GONE.encode(), "more_body": False})


async def _live(receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
