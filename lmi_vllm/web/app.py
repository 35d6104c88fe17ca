"""`create_app`: routes, common headers, and the one place where errors become answers."""

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_vllm.errors import (
    Dialect,
    Fault,
    LmiError,
    MethodNotAllowedError,
    PayloadError,
    UnauthorizedError,
)
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.telemetry.records import DISCONNECTED
from lmi_vllm.web.access import (
    CONTINUE,
    check_expectation,
    check_not_foreign,
    has_key,
    is_preflight,
)
from lmi_vllm.web.connection import (
    NO_CACHE_HEADERS,
    ClientPatience,
    GuardedConnection,
    watch_body,
)
from lmi_vllm.web.errors import error_response, from_http_exception
from lmi_vllm.web.inference_routes import UNREADABLE_BODY
from lmi_vllm.web.keys import (
    BEGUN,
    DIALECT,
    FORWARDED,
    OPTIONS,
    RECORD,
    REQUEST_ID,
    SERVICE,
    WRITE_TURN,
)
from lmi_vllm.web.recording import begin_record
from lmi_vllm.web.route_families import dialect_of
from lmi_vllm.web.routes import RouteGroup, Routes, add_routes, group_of, is_open
from lmi_vllm.web.row_writer import WriteTurn

logger = logging.getLogger(__name__)

FIRST_ERROR_STATUS: Final = 400
REQUEST_ID_HEADER: Final = "x-request-id"


class ReverseProxy(Protocol):
    """Another process of this server, that answers what this one does not."""

    def takes(self, request: web.Request) -> bool:
        """Whether the other process is to answer the request."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Return its answer, which is written while it arrives."""


@dataclass(frozen=True, slots=True)
class WebOptions:
    """What the HTTP layer needs to know of the configuration."""

    max_request_size: int = 64 << 20  # bytes
    request_id_header: str = REQUEST_ID_HEADER  # of requests; answers always use x-request-id
    api_keys: tuple[str, ...] = ()
    routes: Routes = Routes.ALL
    default_accept: str = ""  # of /invocations and the like, where a request asks for nothing
    allows_handler_override: bool = False  # LMI's switch: else a `handler` property is 400
    patience: ClientPatience = field(default_factory=ClientPatience)
    cors_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    groups: tuple[RouteGroup, ...] = ()  # besides those of extras that every listener has
    proxy: ReverseProxy | None = None  # None: this process answers everything itself


def create_app(service: InferenceService, options: WebOptions | None = None) -> web.Application:
    """Return the application over `service`, whose engine may still be missing."""
    options = options or WebOptions()
    app = web.Application(middlewares=[_common(options)], client_max_size=options.max_request_size)
    app[SERVICE] = service
    app[OPTIONS] = options
    app[WRITE_TURN] = WriteTurn()
    app.on_response_prepare.append(_add_headers)
    add_routes(app)
    for route in app.router.routes():
        # aiohttp's own answers in plain text, before any middleware.
        route._expect_handler = _continue
    return app


def error_answer(request: web.Request, error: LmiError) -> web.Response:
    """Return the answer for an error, in the dialect of the request."""
    service = request.app[SERVICE]
    by_body: Dialect | None = request.get(DIALECT)
    by_path = dialect_of(request.path, is_tgi=service.profile.tgi_compat)
    group = group_of(request)
    if group is None or group.error_body is None:
        return error_response(error, by_body or by_path, service.statuses)
    response = error_response(error, group.error_dialect, service.statuses)
    response.body = group.error_body(error.text.encode("utf-8", "replace").decode())
    return response


def _common(options: WebOptions) -> Middleware:
    """Return the middleware around every handler: id, key, errors, record."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        service = request.app[SERVICE]
        if options.proxy is not None and options.proxy.takes(request):
            return await _forwarded(request, options.proxy, options)
        request[REQUEST_ID] = _request_id(request, options)
        record = request[RECORD] = begin_record(
            request, request[REQUEST_ID], service.telemetry, is_tgi=service.profile.tgi_compat
        )
        status = DISCONNECTED  # unless an answer comes of it
        try:
            with _one_request(request, options):
                if options.cors_headers and is_preflight(request):
                    response: web.StreamResponse = web.Response(
                        body=b"{}\n", content_type="application/json"
                    )
                else:
                    response = await _answer(request, handler, options)
            if request.transport is not None:
                status = response.status
        finally:
            record.end(status)
        return response

    return middleware


async def _forwarded(
    request: web.Request, proxy: ReverseProxy, options: WebOptions
) -> web.StreamResponse:
    """Let the other process answer; it checks, counts and logs the request as well."""
    request[REQUEST_ID] = _request_id(request, options)
    try:
        check_expectation(request)
        with _one_request(request, options):
            return await proxy.answer(request)
    except LmiError as error:
        return error_answer(request, error)


@contextlib.contextmanager
def _one_request(request: web.Request, options: WebOptions) -> Iterator[None]:
    """Bound the time of the body while one request is answered."""
    connection = request.protocol
    if isinstance(connection, GuardedConnection):
        connection.request_began()
    timer = watch_body(request, options.patience.body)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
        if isinstance(connection, GuardedConnection):
            connection.request_ended()


async def _answer(
    request: web.Request, handler: Handler, options: WebOptions
) -> web.StreamResponse:
    try:
        _check_headers(request, options)
        return await handler(request)
    except web.HTTPException as error:
        return _refusal(request, from_http_exception(error, options.max_request_size), options)
    except (LmiError, web.RequestPayloadError) as error:
        known = error if isinstance(error, LmiError) else PayloadError(UNREADABLE_BODY)
        return _refusal(request, known, options)
    except Exception as error:
        request[RECORD].fault = Fault.ENGINE
        begun: web.StreamResponse | None = request.get(BEGUN)
        if begun is not None and isinstance(error, ConnectionError):
            return begun  # the client went away while we wrote
        logger.exception("request %s failed", request[REQUEST_ID])
        if begun is not None and request.transport is not None:
            # A status line cannot follow one: cut the stream, so that nobody takes it for whole.
            request.transport.abort()
            return begun
        request.app[SERVICE].lifecycle.error_rates.record(LmiError())
        # An unknown fault's text may hold anything: it goes to the log only.
        return error_answer(request, LmiError("Internal server error"))


def _check_headers(request: web.Request, options: WebOptions) -> None:
    if options.api_keys and not is_open(request) and not has_key(request, options.api_keys):
        raise UnauthorizedError
    check_not_foreign(request, allows_cors=bool(options.cors_headers))
    if (group := group_of(request)) is not None:
        group.check(request)
    check_expectation(request)


def _refusal(request: web.Request, error: LmiError, options: WebOptions) -> web.Response:
    request[RECORD].fault = error.fault
    response = error_answer(request, error)
    if isinstance(error, MethodNotAllowedError):
        response.headers["Allow"] = ", ".join(error.allowed)
    return response


async def _continue(request: web.Request) -> None:
    """Let a client that waits send its body; other expectations are refused like all else."""
    if request.headers.get("Expect", "").lower() == CONTINUE:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has sent nothing yet


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    request[BEGUN] = response
    if request.get(FORWARDED):
        return
    response.headers.extend(NO_CACHE_HEADERS)
    group = group_of(request)
    if group is None or group.allows_cors:
        response.headers.extend(request.app[OPTIONS].cors_headers)
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
    if response.status >= FIRST_ERROR_STATUS:
        response.force_close()
        response.headers["Connection"] = "close"


def _request_id(request: web.Request, options: WebOptions) -> str:
    """Return the client's id, or a new one where there is none that a header can give back."""
    given = request.headers.get(options.request_id_header, "")
    return given if given and given.isascii() and given.isprintable() else str(uuid.uuid4())
