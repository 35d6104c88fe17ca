"""One connection, which may not be slow for ever: at sending headers or bodies, or at reading.

aiohttp bounds the size and number of headers (8190 bytes each, 128 of them) and closes what is idle
for an hour; that is all. A client that reads too slowly stops the engine's output where it is
(nothing is buffered beyond the socket), and is cut off when that lasts.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from lmi_vllm.errors import SlowBodyError

logger = logging.getLogger(__name__)

NO_CACHE_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Pragma": "no-cache",
        "Cache-Control": "no-cache; no-store, must-revalidate, private",
        "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
    }
)
# Longer than any load balancer keeps a connection (Google's: 600 s), or it would race with us.
KEEP_ALIVE_SECONDS: Final = 630.0
TLS_HANDSHAKE_SECONDS: Final = 20.0
BAD_REQUEST: Final = 400
LONGEST_REASON: Final = 200  # characters of a parser's message, which may quote what it read


@dataclass(frozen=True, slots=True)
class ClientPatience:
    """How long a client may take, in seconds, 0 being for ever; settings are LMI_<NAME>_TIMEOUT."""

    header: float = 30.0  # from the first byte of a request, or the connection, to its last header
    body: float = 120.0  # for the whole body
    send: float = 60.0  # until what is waiting to be read has been read


class ClientConnection(web.RequestHandler):
    """aiohttp's connection with timers for headers and for readers."""

    __slots__ = ("_is_idle", "_patience", "_timers")

    def __init__(self, server: web.Server, patience: ClientPatience, **options: Any) -> None:
        super().__init__(server, keepalive_timeout=KEEP_ALIVE_SECONDS, **options)
        self._patience = patience
        self._is_idle = True
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._start("LMI_HEADER_TIMEOUT", self._patience.header)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget every timer."""
        for setting in tuple(self._timers):
            self._stop(setting)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Begin to wait for the rest of the headers with the first byte of a request."""
        if self._is_idle and data:
            self._start("LMI_HEADER_TIMEOUT", self._patience.header)
        super().data_received(data)

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._start("LMI_SEND_TIMEOUT", self._patience.send)

    def resume_writing(self) -> None:
        """The client has read enough for us to go on."""
        self._stop("LMI_SEND_TIMEOUT")
        super().resume_writing()

    def request_began(self) -> None:
        """All headers have come."""
        self._is_idle = False
        self._stop("LMI_HEADER_TIMEOUT")

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
        """Return our kind of answer for what no handler saw: rubbish, or a fault around one."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status == BAD_REQUEST:
            kind, text = "BadRequestException", (message or "not HTTP")[:LONGEST_REASON]
            logger.info("%s sent no readable request: %s", request.remote, text.splitlines()[:1])
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
        """Say in a line what a client did to the rest of a body that was answered already."""
        error = options.get("exc_info")
        if isinstance(error, (web.RequestPayloadError, SlowBodyError)):
            text = " ".join(str(error).split())[:LONGEST_REASON]
            logger.info("%s sent no readable body: %s", self.peername, text)
            return
        super().log_exception(*args, **options)

    def _start(self, setting: str, seconds: float) -> None:
        if seconds and setting not in self._timers:
            give_up = partial(self._give_up, setting, seconds)
            self._timers[setting] = self._loop.call_later(seconds, give_up)

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
    """Make reading the body fail with SlowBodyError unless it has come within the time."""
    if not seconds or not request.body_exists or request.content.is_eof():
        return None
    late = SlowBodyError(f"the body did not arrive within LMI_BODY_TIMEOUT ({seconds:g} s)")
    timer = asyncio.get_running_loop().call_later(seconds, request.content.set_exception, late)
    request.content.on_eof(timer.cancel)
    return timer
