"""`create_app`: the HTTP application over an inference service, and its options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from aiohttp import web

from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.connection import ClientTimeouts, WriteBatch
from lmi_vllm.web.engine_routes import add_openai_routes
from lmi_vllm.web.inference_routes import add_health_routes, add_inference_routes
from lmi_vllm.web.management_routes import add_front_page, add_management_routes
from lmi_vllm.web.middleware import REQUEST_ID_HEADER, Router, add_headers, request_middleware
from lmi_vllm.web.request import (
    GROUPS,
    OPTIONS,
    SERVICE,
    WRITE_BATCH,
    PathPrefix,
    RouteGroup,
    Routes,
    rerouting,
)


class ReverseProxy(Protocol):
    """A reverse proxy to the first front-end process, for the routes that this one lacks."""

    def takes(self, request: web.Request) -> bool:
        """Whether the first process answers the request."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Forward the request and stream the response back."""


@dataclass(frozen=True, slots=True)
class WebOptions:
    """The part of the configuration that the HTTP layer uses."""

    max_request_size: int = 64 << 20  # bytes
    request_id_header: str = REQUEST_ID_HEADER  # the request's id; answers always use x-request-id
    api_keys: tuple[str, ...] = ()
    is_health_liveness: bool = True  # `/health` as of vllm serve; else as `/ping`
    routes: Routes = Routes.ALL
    default_accept: str = ""  # of /invocations and similar routes, if a request asks for none
    allows_handler_override: bool = False  # LMI's switch: without it a `handler` property is 400
    timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    prefix: PathPrefix | None = None  # a prefix of paths
    cors_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    groups: tuple[RouteGroup, ...] = ()  # of features
    proxy: ReverseProxy | None = None  # None: this process answers every request


def create_app(service: InferenceService, options: WebOptions | None = None) -> web.Application:
    """Return the application over `service`, whose engine may not have started yet."""
    options = options or WebOptions()
    app = web.Application(
        middlewares=[request_middleware(service, options)], client_max_size=options.max_request_size
    )
    app._router = Router(service)
    app._make_request = rerouting(app._make_request)  # type: ignore[assignment,method-assign]
    app[SERVICE] = service
    app[OPTIONS] = options
    app[WRITE_BATCH] = WriteBatch()
    app.on_response_prepare.append(add_headers)
    _add_routes(app)
    return app


def _add_routes(app: web.Application) -> None:
    """Register every configured route: inference, then extras' routes."""
    options = app[OPTIONS]
    app[GROUPS] = options.groups
    add_health_routes(app)
    if options.routes is not Routes.MANAGEMENT:
        add_inference_routes(app)
    for group in app[GROUPS]:
        group.add(app)
    add_front_page(app)
    if options.routes is not Routes.MANAGEMENT:
        add_openai_routes(app)
    if options.routes is not Routes.INFERENCE:
        add_management_routes(app)
