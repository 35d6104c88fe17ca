"""`create_app`: routes, common headers, and the one place where errors become answers."""

import hmac
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from lmi_vllm.errors import LmiError, RouteFamily
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.errors import error_response, from_http_exception
from lmi_vllm.web.inference_routes import add_inference_routes
from lmi_vllm.web.keys import OPTIONS, REQUEST_ID, SERVICE
from lmi_vllm.web.management_routes import add_management_routes

logger = logging.getLogger(__name__)

NO_CACHE_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Pragma": "no-cache",
        "Cache-Control": "no-cache; no-store, must-revalidate, private",
        "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
    }
)
# Routes that a platform must reach without a key (http-api.md 13).
OPEN_PATHS: Final = frozenset({"/ping", "/live", "/ready", "/health"})
FIRST_ERROR_STATUS: Final = 400


@dataclass(frozen=True, slots=True)
class WebOptions:
    """What the HTTP layer needs to know of the configuration."""

    max_request_size: int = 64 << 20  # bytes
    request_id_header: str = "x-request-id"
    api_keys: tuple[str, ...] = ()
    cors_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def create_app(service: InferenceService, options: WebOptions | None = None) -> web.Application:
    """Return the application over `service`, whose engine may still be missing."""
    options = options or WebOptions()
    app = web.Application(middlewares=[_common(options)], client_max_size=options.max_request_size)
    app[SERVICE] = service
    app[OPTIONS] = options
    app.on_response_prepare.append(_add_headers)
    add_inference_routes(app)
    add_management_routes(app)
    return app


def route_family(request: web.Request) -> RouteFamily:
    """Return the dialect in which `request` has to be refused."""
    path = request.path
    if path.startswith("/v1/"):
        return RouteFamily.OPENAI
    if path.startswith(("/invocations", "/predictions")) or path.endswith("/invoke"):
        is_tgi = request.app[SERVICE].profile.tgi_compat
        return RouteFamily.TGI if is_tgi else RouteFamily.LMI
    return RouteFamily.SERVER


def _common(options: WebOptions) -> Middleware:
    """Return the middleware around every handler: id, key, errors, access line."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        began = time.monotonic()
        request[REQUEST_ID] = request.headers.get(options.request_id_header) or str(uuid.uuid4())
        if not _has_key(request, options.api_keys):
            response: web.StreamResponse = _unauthorized(request)
        else:
            response = await _answer(request, handler, options)
        logger.info(
            '%s "%s %s HTTP/1.1" %d %d RequestId=[%s]',
            request.remote,
            request.method,
            request.path_qs,
            response.status,
            round((time.monotonic() - began) * 1000),
            request[REQUEST_ID],
        )
        return response

    return middleware


async def _answer(
    request: web.Request, handler: Handler, options: WebOptions
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        ours = from_http_exception(error, options.max_request_size)
        return error_response(ours, route_family(request))
    except LmiError as error:
        return error_response(error, route_family(request))
    except Exception:
        logger.exception("request %s failed", request[REQUEST_ID])
        # An unknown fault's text may hold anything: it goes to the log only.
        return error_response(LmiError("Internal server error"), route_family(request))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.extend(NO_CACHE_HEADERS)
    options = request.app[OPTIONS]
    response.headers.extend(options.cors_headers)
    response.headers[options.request_id_header] = request.get(REQUEST_ID, "")
    if response.status >= FIRST_ERROR_STATUS:
        response.force_close()
        response.headers["Connection"] = "close"


def _has_key(request: web.Request, keys: tuple[str, ...]) -> bool:
    if not keys or request.path in OPEN_PATHS:
        return True
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
    given = given or request.headers.get("x-api-key", "")
    is_known = False
    for key in keys:  # all of them, in full: the time taken says nothing about any
        is_known |= hmac.compare_digest(given.encode(), key.encode())
    return is_known


def _unauthorized(request: web.Request) -> web.Response:
    text = "A valid API key is required: Authorization: Bearer <key>, or x-api-key"
    if route_family(request) is RouteFamily.OPENAI:
        detail = {"message": text, "type": "AuthenticationError", "param": None, "code": 401}
        body: object = {"error": detail}
    else:
        body = {"code": 401, "type": "UnauthorizedException", "message": text}
    return web.json_response(body, status=401, headers={"WWW-Authenticate": "Bearer"})
