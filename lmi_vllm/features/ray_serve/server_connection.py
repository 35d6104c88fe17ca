"""A connection of the relay to the server of its replica, one request after the other.

A protocol of asyncio with the parser of Ray's own HTTP server. A client library's layers cost a row
of a stream twice as much, and a request five times as much.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, cast

import httptools

MOST_WAITING: Final = 1 << 18  # bytes of an answer that were not taken yet: then nothing is read
LONGEST_IDLE: Final = 300.0  # seconds; the server closes an idle connection after 630

Headers = Sequence[tuple[bytes, bytes]]


class ServerGoneError(ConnectionError):
    """The connection ended before the answer did."""


class ServerConnection(asyncio.Protocol):
    """Sends a request and gives its answer in pieces, as they come."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_lost = False
        self._keeps = True
        self._is_idle = False
        self._idle_since = 0.0

    def begin(self, head: bytes, body: bytes, *, is_head_request: bool) -> None:
        """Send a request, or as much of it as there is."""
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._waiting = 0
        self._is_complete = False
        self._is_head_request = is_head_request
        self._is_idle = False
        self.is_sent = False
        self._transport.write(head + body)

    async def send_more(self, body: bytes) -> None:
        """Send more of a request, once the server reads."""
        if not self._is_lost:
            self._transport.write(body)
            await self._may_write.wait()

    async def read_head(self) -> None:
        """Return once `status` and `headers` are there.

        Raises:
            ServerGoneError: the connection has ended.
        """
        while not self.status:
            await self._more()

    async def read_piece(self) -> tuple[bytes, bool]:
        """Return what has come of the body, and whether it was the last of it.

        Raises:
            ServerGoneError: the connection has ended.
        """
        while not self._pieces and not self._is_complete:
            await self._more()
        pieces, self._pieces = self._pieces, []
        if self._waiting > MOST_WAITING:
            self._transport.resume_reading()
        self._waiting = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces), self._is_complete

    def may_be_used(self) -> bool:
        """Whether another request can be sent."""
        return not self._is_lost and self._loop.time() - self._idle_since < LONGEST_IDLE

    def is_free(self) -> bool:
        """Whether request and answer are whole and the server keeps the connection."""
        self._idle_since = self._loop.time()
        self._is_idle = self._is_complete and self._keeps and self.is_sent and not self._is_lost
        return self._is_idle

    def close(self) -> None:
        """End the connection, and with it what the server does for it."""
        self._is_lost = True
        self._transport.abort()
        self._wake()

    def _more(self) -> "asyncio.Future[None]":
        if self._is_lost:
            raise ServerGoneError("the server ended the connection before its answer was whole")
        self._waiter = waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer; what comes unasked must not answer the next request."""
        if self._is_idle:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        self._waiting += len(data)
        if self._waiting > MOST_WAITING:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what waits."""
        self._is_lost = True
        self._may_write.set()
        self._wake()

    def pause_writing(self) -> None:
        """Hold the request back."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Let the request go on."""
        self._may_write.set()

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is there; an answer to HEAD is then whole, whatever length it names."""
        self.status = self._parser.get_status_code()
        if self._is_head_request:
            self._is_complete, self._keeps = True, False

    def on_body(self, body: bytes) -> None:
        """Keep a piece."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._keeps = self._keeps and self._parser.should_keep_alive()
        self._is_complete = True
