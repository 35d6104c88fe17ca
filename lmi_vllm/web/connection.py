"""One connection: time limits for the client, and batched writes of rows.

A client must not be slow for ever: neither at sending headers or bodies, nor at reading. aiohttp
only bounds the size and number of headers (8190 bytes each, 128 of them), and closes connections
that are idle for an hour. A client that reads too slowly stops the engine's output at that point
(nothing is buffered beyond the socket). If that lasts, it is cut off.

A step of the engine has one token for each of its streams. A single write finds its reader asleep,
and waking it costs several times the write itself (DECISIONS.md 43). In a series of writes the
reader is still awake. So the writes of all streams are batched. Several rows of a stream in one
turn are one write.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from aiohttp import HttpVersion11, web
from aiohttp.client_exceptions import ClientConnectionResetError

from lmi_vllm.errors import SlowBodyError

logger = logging.getLogger(__name__)

NO_CACHE_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Pragma": "no-cache",
        "Cache-Control": "no-cache; no-store, must-revalidate, private",
        "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
    }
)
# Longer than any load balancer keeps a connection (Google's: 600 s); else both might close it.
KEEP_ALIVE_SECONDS: Final = 630.0
TLS_HANDSHAKE_SECONDS: Final = 20.0
BAD_REQUEST: Final = 400
LONGEST_REASON: Final = 200  # characters of a parser's message, which may quote the input
FLUSH_BYTES: Final = 64 << 10  # the amount at which a transport asks for a pause


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Time limits of a client in seconds, 0 for none; the settings are LMI_<NAME>_TIMEOUT."""

    header: float = 30.0  # from a request's first byte, or the connection, to its last header
    body: float = 120.0  # for the whole body
    send: float = 60.0  # until waiting data has been read


class ClientConnection(web.RequestHandler):
    """aiohttp's connection with timers for headers and for readers."""

    __slots__ = ("_is_idle", "_timeouts", "_timers")

    def __init__(self, server: web.Server, timeouts: ClientTimeouts, **options: Any) -> None:
        # aiohttp takes a cut gzip body for a whole one: `read_body` unpacks.
        options = {"keepalive_timeout": KEEP_ALIVE_SECONDS, "auto_decompress": False, **options}
        super().__init__(server, **options)
        self._timeouts = timeouts
        self._is_idle = True
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit for the first request."""
        super().connection_made(transport)
        self._start("LMI_HEADER_TIMEOUT", self._timeouts.header)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop every timer."""
        for setting in tuple(self._timers):
            self._stop(setting)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the time limit for headers with the first byte of a request."""
        super().data_received(data)
        if self._is_idle and data and not self._messages:
            self._start("LMI_HEADER_TIMEOUT", self._timeouts.header)

    def pause_writing(self) -> None:
        """Start the time limit for the client to read."""
        super().pause_writing()
        self._start("LMI_SEND_TIMEOUT", self._timeouts.send)

    def resume_writing(self) -> None:
        """Stop the time limit: the client has read enough."""
        self._stop("LMI_SEND_TIMEOUT")
        super().resume_writing()

    def request_began(self) -> None:
        """Stop the time limit for headers: all have come."""
        self._is_idle = False
        if (timer := self._timers.pop("LMI_HEADER_TIMEOUT", None)) is not None:
            timer.cancel()

    def request_ended(self) -> None:
        """The next bytes belong to another request."""
        self._is_idle = True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer for malformed HTTP, or for an error outside of a handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status == BAD_REQUEST:
            kind, text = "BadRequestException", (message or "not HTTP")[:LONGEST_REASON]
            logger.info("%s sent malformed HTTP: %s", request.remote, text.splitlines()[:1])
        else:
            kind, text = "InternalServerException", "Internal server error"
            logger.error("request failed outside its handler", exc_info=exc)
        document = {"code": status, "type": kind, "message": text}
        headers = {"Connection": "close", "x-request-id": str(uuid.uuid4()), **NO_CACHE_HEADERS}
        response = web.Response(
            status=status,
            body=(json.dumps(document, indent=2) + "\n").encode(),
            headers=headers,
            content_type="application/json",
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log in one line a failed body of a request that was answered before."""
        error = options.get("exc_info")
        if isinstance(error, (web.RequestPayloadError, SlowBodyError)):
            text = " ".join(str(error).split())[:LONGEST_REASON]
            logger.info("%s sent a malformed body: %s", self.peername, text)
            return
        super().log_exception(*args, **options)

    def _start(self, setting: str, seconds: float) -> None:
        if seconds and setting not in self._timers:
            timer = self._loop.call_later(seconds, self._give_up, setting, seconds)
            self._timers[setting] = timer

    def _stop(self, setting: str) -> None:
        timer = self._timers.pop(setting, None)
        if timer is not None:
            timer.cancel()

    def _give_up(self, setting: str, seconds: float) -> None:
        self._timers.pop(setting, None)
        if self.transport is None:
            return
        logger.info("%s was too slow: %s (%g s)", self.peername, setting, seconds)
        self.transport.abort()  # a close would wait for the client to read


def watch_body(request: web.Request, seconds: float) -> asyncio.TimerHandle | None:
    """Let a read of the body fail with SlowBodyError unless it has come within the time."""
    if not seconds or not request.body_exists or request.content.is_eof():
        return None
    late = SlowBodyError(f"the body did not arrive within LMI_BODY_TIMEOUT ({seconds:g} s)")
    timer = asyncio.get_running_loop().call_later(seconds, request.content.set_exception, late)
    request.content.on_eof(timer.cancel)
    return timer


class WriteBatch:
    """Batches the writes of all streams in one turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: list[RowWriter] = []

    def add(self, writer: "RowWriter") -> None:
        """Let `writer` flush at the end of this turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(writer)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        now = asyncio.get_running_loop().time()
        for writer in waiting:
            writer.written_at = now
            writer.flush()


class RowResponse(web.StreamResponse):
    """A response whose headers wait for its first row, which saves a packet and a wake-up."""

    _send_headers_immediately = False
    is_sent = False  # to its end: a client that has all of it may leave before the request ends

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the end; raise an error if the client has disconnected."""
        await super().write_eof(data)
        self.is_sent = True


class RowWriter:
    """Writes the rows of one prepared response, each as one chunk of HTTP.

    It makes aiohttp's checks before a write: the transport exists and is not closing.
    """

    def __init__(self, request: web.Request, batch: WriteBatch) -> None:
        self._protocol = request.protocol
        self._payload = request.writer
        self._batch = batch
        self._is_chunked = request.version >= HttpVersion11
        self._has_body = request.method != "HEAD"
        self._rows = b""
        self._has_begun = False
        self.written_at = 0.0  # when rows were last sent, by the event loop's clock

    @property
    def is_paused(self) -> bool:
        """Whether the client has to read before more is written."""
        return self._protocol.writing_paused

    def write(self, row: bytes) -> None:
        """Take a row; it is sent at the end of this turn of the event loop.

        Raises:
            ConnectionError: the client is gone.
        """
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("Cannot write to closing transport")
        self.put(row)

    def put(self, row: bytes) -> None:
        """Take a row as `write` does; drop it if the client has disconnected."""
        if not row or not self._has_body:
            return
        if self._is_chunked:
            row = b"%x\r\n%b\r\n" % (len(row), row)
        if not self._rows:  # nearly always: a turn of the loop has one row of a stream
            self._batch.add(self)
            self._rows = row
            return
        self._rows += row
        if len(self._rows) > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows; drop them if the client has disconnected."""
        rows, self._rows = self._rows, b""
        transport = self._protocol.transport
        if not rows or transport is None or transport.is_closing():
            return
        if not self._has_begun:
            self._has_begun = True
            self._payload.send_headers()
        transport.write(rows)

    def end(self) -> None:
        """Write the buffered rows, or only the headers; nothing may be written after it."""
        self.flush()
        transport = self._protocol.transport
        if transport is not None and not transport.is_closing():
            self._payload.send_headers()

    async def drain(self) -> None:
        """Wait until more may be sent to the client."""
        self.flush()
        await self._payload.drain()
