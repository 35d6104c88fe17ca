"""Middleware of every request: its id and record, its key, and answers for errors."""

import asyncio
import contextlib
import hmac
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_vllm.errors import (
    Dialect,
    ExpectationError,
    Fault,
    LmiError,
    MethodNotAllowedError,
    PayloadError,
    SlowBodyError,
    UnauthorizedError,
)
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.connection import NO_CACHE_HEADERS, ClientConnection, RowResponse, watch_body
from lmi_vllm.web.cross_site import (
    check_same_site,
    cors_headers,
    is_origin_allowed,
    is_preflight,
    preflight_answer,
)
from lmi_vllm.web.engine_routes import engine_route
from lmi_vllm.web.errors import error_response, forget_frames, from_http_exception
from lmi_vllm.web.inference_routes import UNREADABLE_BODY, is_waiting_in_vain
from lmi_vllm.web.request import (
    BEGUN,
    DIALECT,
    ENGINE_ROUTE,
    FORWARDED,
    OPTIONS,
    RECORD,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    SERVICE,
    ReverseProxy,
    WebOptions,
    begin_record,
    check_rerouted,
    group_of,
    is_open,
    path_dialect,
)
from lmi_vllm.web.rerouting import ORIGINAL

logger = logging.getLogger(__name__)

FIRST_ERROR_STATUS: Final = 400
CONTINUE: Final = "100-continue"
OK: Final = 200
_OF_USERS: Final = ("/ping", "/invocations")
SMALL_BODY: Final = 64 << 10  # bytes


def error_answer(request: web.Request, error: LmiError) -> web.Response:
    """Return the answer for an error, in the dialect of the request."""
    service = request.app[SERVICE]
    by_body: Dialect | None = request.get(DIALECT)
    group = group_of(request)
    if group is None or group.error_body is None:
        return error_response(error, by_body or path_dialect(request), service.statuses)
    response = error_response(error, group.error_dialect, service.statuses)
    response.body = group.error_body(error.text.encode("utf-8", "replace").decode())
    return response


def request_middleware(service: InferenceService, options: WebOptions) -> Middleware:
    """Return the middleware around every handler: id, key, errors, record."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if options.proxy is not None and options.proxy.takes(request):
            return await _forwarded(request, options.proxy, options)
        request[REQUEST_ID] = _request_id(request, options)
        record = request[RECORD] = begin_record(request, request[REQUEST_ID], service.telemetry)
        response: web.StreamResponse | None = None
        timer = _began(request, options)
        try:
            if options.cors_headers and is_preflight(request):
                response = preflight_answer(request, options.cors_headers)
            else:
                try:
                    _check_headers(request, options)
                    response = await handler(request)
                except Exception as error:  # noqa: BLE001 (`_failed` logs those that are not ours)
                    response = _failed(request, error, options)
        finally:
            _ended(request, timer)
            record.end(_received_status(request, response))
        return response

    return middleware


def _received_status(request: web.Request, response: web.StreamResponse | None) -> int | None:
    """Return the status of the answer that the client got; None if it had left."""
    begun = request.get(BEGUN)
    if isinstance(begun, RowResponse) and begun.is_sent:  # who has it all may leave first
        return begun.status
    return None if response is None or request.transport is None else response.status


async def _forwarded(
    request: web.Request, proxy: ReverseProxy, options: WebOptions
) -> web.StreamResponse:
    """Let the first process answer; it also checks, counts and logs the request."""
    request[REQUEST_ID] = _request_id(request, options)
    timer = _began(request, options)
    try:
        check_expectation(request)
        return await proxy.answer(request)
    except LmiError as error:
        forget_frames(error)
        return error_answer(request, error)
    finally:
        _ended(request, timer)


def _began(request: web.Request, options: WebOptions) -> asyncio.TimerHandle | None:
    """Start the time limit of the body; that of the headers ends."""
    if isinstance(connection := request.protocol, ClientConnection):
        connection.request_began()
    return watch_body(request, options.timeouts.body)


def _ended(request: web.Request, timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
    if isinstance(connection := request.protocol, ClientConnection):
        connection.request_ended()


def _failed(request: web.Request, error: Exception, options: WebOptions) -> web.StreamResponse:
    """Return the answer for an error of a handler, or the answer that has begun."""
    if isinstance(error, web.HTTPException):
        forget_frames(error)
        return _refusal(request, from_http_exception(error, options.max_request_size))
    if isinstance(error, (LmiError, web.RequestPayloadError)):
        forget_frames(error)
        known = error if isinstance(error, LmiError) else PayloadError(UNREADABLE_BODY)
        return _refusal(request, known)
    is_gone = BEGUN in request and isinstance(error, ConnectionError)  # while we wrote
    if not is_gone:
        request[RECORD].fault = Fault.ENGINE
        logger.error("request %s failed", request[REQUEST_ID], exc_info=error)
    forget_frames(error)
    if BEGUN in request:
        return _begun_answer(request, is_whole=is_gone)
    # An unknown error's text may have secrets: it is only logged.
    return error_answer(request, LmiError("Internal server error"))


def _begun_answer(request: web.Request, *, is_whole: bool = False) -> web.StreamResponse:
    """Return the answer that has begun, cut, so that a client does not take it for complete."""
    if not is_whole and request.transport is not None:
        request.transport.abort()  # no status line can follow one
    return request[BEGUN]


def _check_headers(request: web.Request, options: WebOptions) -> None:
    if options.api_keys and not is_open(request):
        keys = (
            enumerate(options.api_keys) if options.renewed_keys is None else options.renewed_keys()
        )
        request[RECORD].key = key_of(request, tuple(keys))
    allows_cors = bool(options.cors_headers) and is_origin_allowed(request, options.cors_headers)
    check_same_site(request, allows_cors=allows_cors)
    if (group := group_of(request)) is not None:
        group.check(request)
    if "Expect" in request.headers:
        check_expectation(request)
    if ORIGINAL in request:
        check_rerouted(request)


def _refusal(request: web.Request, error: LmiError) -> web.StreamResponse:
    request[RECORD].fault = error.fault
    if BEGUN in request:
        return _begun_answer(request)
    response = error_answer(request, error)
    if isinstance(error, MethodNotAllowedError):
        response.headers["Allow"] = ", ".join(error.allowed)
    return response


async def allow_body(request: web.Request) -> None:
    """Let a waiting client send its body; other expectations are refused like other errors."""
    if is_waiting_in_vain(request):
        return
    if request.headers.get("Expect", "").lower() == CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun


class Router(web.UrlDispatcher):
    """A router that sends every path without a route of ours to the engine's application.

    It lets `allow_body` handle `Expect` on every path.
    """

    def __init__(self, service: InferenceService) -> None:
        super().__init__()
        self._service = service
        self._others: set[str] = set()  # paths of the engine's application that are not ours
        self._other = web.ResourceRoute("*", engine_route, None, expect_handler=allow_body)  # type: ignore[arg-type]

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        """Return the match; aiohttp would make an answer and a route for each unknown path."""
        path = request.rel_url.path_safe
        is_asked = path in _OF_USERS and self._service.sees_every_request
        if path not in self._others and not (is_asked and self._is_users(request, path)):
            match = await super().resolve(request)
            if not isinstance(match.http_exception, web.HTTPNotFound):
                match.route._expect_handler = allow_body
                return match
        route = self._service.find_route(request.method, request.path)
        request[ENGINE_ROUTE] = (route,)
        if route is not None and route.path == path:
            self._others.add(path)
        return web.UrlMappingMatchInfo({}, self._other)

    def _is_users(self, request: web.Request, path: str) -> bool:
        """Whether the user's code in the engine's application answers instead of us."""
        route = self._service.find_route(request.method, path)
        is_there = route is not None and request.method in route.methods
        return is_there and (path != "/ping" or self._service.lifecycle.ping()[0] == OK)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every answer."""
    request[BEGUN] = response
    if request.get(FORWARDED):
        return
    response.headers.extend(NO_CACHE_HEADERS)
    if configured := request.app[OPTIONS].cors_headers:
        group = group_of(request)
        if group is None or group.allows_cors:
            response.headers.extend(cors_headers(request, configured))
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
    if response.status < FIRST_ERROR_STATUS:
        return
    record = request.get(RECORD)
    if record is not None and record.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(record.retry_after_seconds)
    # A client that is refused during a drain has to connect to another server.
    is_draining = request.app[SERVICE].lifecycle.state is State.DRAINING
    if is_draining or not await _is_body_complete(request):
        response.force_close()
        response.headers["Connection"] = "close"


async def _is_body_complete(request: web.Request) -> bool:
    """Whether the body has arrived; waits for the rest of a small one.

    A client that waits for `100 Continue` may never send its body.
    """
    if "Expect" not in request.headers and (request.content_length or 0) <= SMALL_BODY:
        with contextlib.suppress(web.RequestPayloadError, SlowBodyError, ConnectionError):
            while request.content_length and not request.content.is_eof():
                await request.content.readany()
    return request.content.is_eof() and request.content.exception() is None


def _request_id(request: web.Request, options: WebOptions) -> str:
    """Return the client's id, or a new one if there is none that a header can hold."""
    given = request.headers.get(options.request_id_header, "")
    return given if given and given.isascii() and given.isprintable() else str(uuid.uuid4())


def key_of(request: web.Request, keys: Sequence[tuple[int, str]]) -> int:
    """Return the number of the key that the request has, as a bearer token or in x-api-key.

    Raises:
        UnauthorizedError: none of them.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [request.headers.get("x-api-key", "")]
    if scheme.lower() == "bearer":
        given.append(token.strip())
    index = None
    for text in given:
        shown = text.encode("utf-8", "surrogateescape")
        for number, key in keys:  # all, in full: the time must not depend on the key
            if hmac.compare_digest(shown, key.encode()):
                index = number
    if index is None:
        raise UnauthorizedError
    return index


def check_expectation(request: web.Request) -> None:
    """Check that the client expects only what this server supports.

    Raises:
        ExpectationError: it expects something else than 100-continue.
    """
    if request.headers.get("Expect", CONTINUE).lower() != CONTINUE:
        raise ExpectationError("Expect: only 100-continue is supported")
