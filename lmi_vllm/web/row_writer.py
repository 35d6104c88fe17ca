"""The bytes of many streams, written back to back at the end of the event loop's turn.

A step of the engine brings one token to each of its streams. Written one by one in between the work
on the others, each write finds its reader asleep and pays for waking it, several times what the
write itself costs (DECISIONS.md 43); written in a row, the reader is still awake. Several rows of a
stream that come in one turn are one write.
"""

import asyncio
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.client_exceptions import ClientConnectionResetError

UNWRITTEN_BYTES: Final = 64 << 10  # as much as a transport takes before it wants a pause


class WriteTurn:
    """Writes what the streams of one event loop have said in one of its turns."""

    def __init__(self) -> None:
        self._waiting: list[RowWriter] = []

    def add(self, writer: "RowWriter") -> None:
        """Let `writer` flush at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(writer)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.flush()


class RowResponse(web.StreamResponse):
    """A response whose headers wait for its first row: one packet less to send and to wake for."""

    _send_headers_immediately = False


class RowWriter:
    """Writes the rows of one prepared response, each as one chunk of HTTP.

    What aiohttp checks before a write is checked here: the transport is there and not closing.
    """

    def __init__(self, request: web.Request, turn: WriteTurn) -> None:
        self._protocol = request.protocol
        self._payload = request.writer
        self._turn = turn
        self._is_chunked = request.version >= HttpVersion11
        self._has_body = request.method != "HEAD"
        self._rows: list[bytes] = []
        self._size = 0

    @property
    def is_paused(self) -> bool:
        """Whether the client has to read first."""
        return self._protocol.writing_paused

    def write(self, row: bytes) -> None:
        """Take a row; it is on its way when this turn of the event loop ends.

        Raises:
            ConnectionError: the client is gone.
        """
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("Cannot write to closing transport")
        self.put(row)

    def put(self, row: bytes) -> None:
        """Take a row as `write` does; for a client that is gone it is dropped."""
        if not row or not self._has_body:
            return
        if not self._rows:
            self._turn.add(self)
        if self._is_chunked:
            row = b"%x\r\n%b\r\n" % (len(row), row)
        self._rows.append(row)
        self._size += len(row)
        if self._size > UNWRITTEN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been taken; a client that is gone gets nothing."""
        rows, self._rows = self._rows, []
        size, self._size = self._size, 0
        transport = self._protocol.transport
        if not rows or transport is None or transport.is_closing():
            return
        self._payload.send_headers()  # at first; they leave in one packet with the rows
        self._payload.output_size += size
        transport.write(rows[0] if len(rows) == 1 else b"".join(rows))

    def end(self) -> None:
        """Write what there is, if it is only the headers: nothing else may be said any more."""
        self.flush()
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            self._payload.send_headers()

    async def drain(self) -> None:
        """Return when the client may be sent more."""
        self.flush()
        await self._payload.drain()
