"""Properties of one HTTP request: its dialect, its route group and its record.

Labels are bounded, and a record has no secret of the request's address. The typed keys are those of
the application's and the requests' storage.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import quote

from aiohttp import web

from lmi_vllm.errors import Dialect, MethodNotAllowedError, ResourceNotFoundError
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import HttpRoute, RouteKind, ServingProfile
from lmi_vllm.telemetry.observers import Telemetry
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from lmi_vllm.web.connection import ClientTimeouts, WriteBatch
from lmi_vllm.web.rerouting import (
    CUSTOM_ATTRIBUTES,
    MakeRequest,
    rerouted,
    without_last_slash,
)

_READS: Final = frozenset({"GET", "HEAD"})
# Routes for a platform's probes, without a key.
OPEN_PATHS: Final = frozenset(
    {"/ping", "/live", "/ready", "/health", "/v1/health/ready", "/v1/health/live"}
)
# Routes whose streams have their own lane -> the kind of call; and the list of models, to which
# adapters are added. All others of vLLM's are the engine's (web/engine_routes.py).
OPENAI_ROUTES: Final = MappingProxyType(
    {
        "/v1/chat/completions": "chat/completions",
        "/v1/completions": "completions",
        "/v1/models": "models",
    }
)
_INFERENCE: Final = frozenset(
    {
        "/invocations", "/models/{model}/invoke",
        "/predictions/{model}", "/predictions/{model}/{version}",
        *OPENAI_ROUTES,
    } - {"/v1/models"}
)  # fmt: skip
# What routers read of a server, and the two routes that split a prompt into tokens for them. With
# `WebOptions.has_open_signals` they need no key.
SIGNALS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "/metrics": _READS,
        "/server/metrics": _READS,
        "/v1/models": _READS,
        "/v1/chat/completions/render": frozenset({"POST"}),
        "/v1/completions/render": frozenset({"POST"}),
    }
)
UNKNOWN_ROUTE: Final = "other"
MASK: Final = "***"
REQUEST_ID_HEADER: Final = "x-request-id"
PEER: Final = "x-lmi-vllm-peer"
LONGEST_PATH: Final = 256  # characters of a client's text
# Parameters that cannot be secret; `src` and `url` may have a login or a signature.
SHOWN_QUERY: Final = frozenset(
    {
        "limit", "next_page_token", "name", "preload", "pin", "starting_after", "stream",
        "model_name", "synchronous", "min_worker", "max_worker", "level", "name[]",
    }
)  # fmt: skip
# Polled every few seconds.
UNTRACED: Final = OPEN_PATHS | {
    "/metrics", "/server/metrics", "/v2/health/live", "/v2/health/ready"
}  # fmt: skip
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# Called with an application and the socket for other processes of the server; returns what changes
# its requests.
PathPrefix = Callable[[web.Application, str], Callable[[MakeRequest], MakeRequest]]


class Routes(StrEnum):
    """The routes of a listener: all, or one group where management has its own address."""

    ALL = "all"
    INFERENCE = "inference"
    MANAGEMENT = "management"


@dataclass(frozen=True, slots=True)
class RouteGroup:
    """Routes of a feature, before all of the core's but inference; it may replace those.

    Paths below `prefix` have the group's own rules, unless they are vLLM's. `is_open` says which of
    its routes, by their patterns, need no key; "" is no route. `check` raises an error to refuse a
    request. `title` is printed with the URL when the server starts. With `error_body` the group
    writes its errors, with the statuses of `error_dialect`. `dialect_of` gives the dialect of a
    path for which the core has none. `is_shared` says which paths are inference, so that any
    process of this server may answer.
    """

    add: Callable[[web.Application], None]
    prefix: str = ""
    title: str = ""
    is_open: Callable[[str], bool] = lambda _: False
    check: Callable[[web.Request], None] = lambda _: None
    allows_cors: bool = False
    error_body: Callable[[str], bytes] | None = None
    error_dialect: Dialect = Dialect.SERVER
    dialect_of: Callable[[str, ServingProfile], Dialect | None] | None = None
    is_shared: Callable[[str], bool] = lambda _: False
    # Pages for a browser, with a description: `/` links them.
    pages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def owns(self, path: str) -> bool:
        """Whether this group's rules apply to `path`."""
        if not self.prefix or path in OPENAI_ROUTES:
            return False
        return path == self.prefix or path.startswith(self.prefix + "/")


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
    api_keys: tuple[str, ...] = ()  # at the start
    renewed_keys: Callable[[], Iterable[tuple[int, str]]] | None = None  # those of now, numbered
    has_open_signals: bool = False  # what routers read needs no key
    is_health_liveness: bool = True  # `/health` as of vllm serve; else as `/ping`
    routes: Routes = Routes.ALL
    default_accept: str = ""  # of /invocations and similar routes, if a request asks for none
    allows_handler_override: bool = False  # LMI's switch: without it a `handler` property is 400
    timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)
    prefix: PathPrefix | None = None  # a prefix of paths
    cors_headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    groups: tuple[RouteGroup, ...] = ()  # of features
    proxy: ReverseProxy | None = None  # None: this process answers every request


SERVICE: Final = web.AppKey("service", InferenceService)
OPTIONS: Final = web.AppKey("options", WebOptions)
GROUPS: "Final[web.AppKey[tuple[RouteGroup, ...]]]" = web.AppKey("groups")
WRITE_BATCH: Final = web.AppKey("write_batch", WriteBatch)
REQUEST_ID: Final = web.RequestKey("request_id", str)
RECORD: Final = web.RequestKey("record", RequestRecord)
# The response whose status line has been sent.
BEGUN: Final = web.RequestKey("begun", web.StreamResponse)
# The dialect of the body, on a path of several dialects.
DIALECT: Final = web.RequestKey("dialect", Dialect)
# The route of the engine's own application, once it was looked up.
ENGINE_ROUTE: "Final[web.RequestKey[tuple[HttpRoute | None]]]" = web.RequestKey("engine_route")
# The answer is another process's, with its headers.
FORWARDED: Final = web.RequestKey("forwarded", bool)


def dialect_of(path: str, profile: ServingProfile, groups: tuple[RouteGroup, ...]) -> Dialect:
    """Return the dialect in which requests for `path` are refused."""
    if path.startswith("/v1/") or path in OPENAI_ROUTES:
        return Dialect.OPENAI
    if path.startswith(("/invocations", "/predictions")) or path.endswith("/invoke"):
        return Dialect.TGI if profile.tgi_compat else Dialect.LMI
    for group in groups:
        if group.dialect_of is not None and (dialect := group.dialect_of(path, profile)):
            return dialect
    return Dialect.SERVER


def path_dialect(request: web.Request) -> Dialect:
    """Return the dialect of the path's errors."""
    found: tuple[HttpRoute | None] | None = request.get(ENGINE_ROUTE)
    if found is not None and found[0] is not None:
        return found[0].dialect
    return dialect_of(request.path, request.app[SERVICE].profile, request.app[GROUPS])


def matched_route(request: web.Request) -> HttpRoute | None:
    """Return the route of the engine's application for a method and a path."""
    cached = request.get(ENGINE_ROUTE)
    if cached is None:  # called several times for a request
        cached = (request.app[SERVICE].find_route(request.method, request.path),)
        request[ENGINE_ROUTE] = cached
    return cached[0]


def group_of(request: web.Request) -> RouteGroup | None:
    """Return the group whose rules apply to this path; None for a path of the core."""
    found = request.get(ENGINE_ROUTE)  # from the router; None for a route of ours
    if found is not None and found[0] is not None:
        return None
    path = request.path
    for group in request.app[GROUPS]:  # called twice for each request
        if group.prefix and path.startswith(group.prefix) and group.owns(path):
            return group
    return None


def is_open(request: web.Request) -> bool:
    """Whether the request needs no key: health, open signals and the open pages of groups.

    A group decides by its route: the text of a path may say less (`%2F`).
    """
    if is_signal(request) or request.path in OPEN_PATHS:
        return True
    resource, group = request.match_info.route.resource, group_of(request)
    route = "" if resource is None else resource.canonical
    return group is not None and group.is_open(route)


def rerouting(make_request: MakeRequest) -> MakeRequest:
    """Return what makes requests out of messages, for the routes that they name."""

    def made(message: Any, *rest: Any) -> web.BaseRequest:
        if message.path.endswith("/") or "/?" in message.path:
            message = without_last_slash(message)
        if CUSTOM_ATTRIBUTES in message.headers:
            return rerouted(make_request, message, *rest)
        return make_request(message, *rest)

    return made


def check_rerouted(request: web.Request) -> None:
    """Return if a rerouted request reaches a route of inference.

    Raises:
        ResourceNotFoundError: it reaches another one, or none.
        NotReadyError: no model is there yet, whose routes may be meant.
    """
    if is_inference(request):
        return
    service = request.app[SERVICE]
    if service.loaded_engine is None and request.match_info.route.resource is None:
        service.lifecycle.check_ready()
    raise ResourceNotFoundError(
        f"route={request.path} in X-Amzn-SageMaker-Custom-Attributes is no route of inference here"
    )


def is_inference(request: web.Request) -> bool:
    """Whether POST to the path of the request asks the model."""
    resource = request.match_info.route.resource
    if resource is not None and resource.canonical in _INFERENCE:
        return True
    path = request.path
    if any(group.is_shared(path) for group in request.app[GROUPS]):
        return True
    route = request.app[SERVICE].find_route("POST", path)
    return route is not None and route.kind is RouteKind.INFERENCE


def is_signal(request: web.Request) -> bool:
    """Whether it reads what routers may read without a key here."""
    methods = SIGNALS.get(request.path, ())
    return request.method in methods and request.app[OPTIONS].has_open_signals


def check_method(request: web.Request, methods: Iterable[str]) -> None:
    """Check that the route has the request's method.

    Raises:
        MethodNotAllowedError: it is not; the answer's `Allow` names those.
    """
    if request.method not in methods:
        raise MethodNotAllowedError(allowed=sorted(methods))


def begin_record(request: web.Request, request_id: str, telemetry: Telemetry) -> RequestRecord:
    """Return the record of a new request; it is the current one from here on."""
    resource = request.match_info.route.resource
    record = RequestRecord(
        request_id,
        request.method if request.method in _METHODS else UNKNOWN_ROUTE,
        UNKNOWN_ROUTE if resource is None else resource.canonical,
        shown_path(request),
        # A forwarded request has PEER; processes that may open our Unix socket are trusted.
        request.remote or request.headers.get(PEER) or "-",
        path_dialect(request),
        telemetry.observers,
    )
    if telemetry.start_span is not None and record.route not in UNTRACED:
        record.span = telemetry.start_span(record, request.headers)
        record.trace_headers = record.span.headers
    enter_record(record)
    return record


def shown_path(request: web.Request) -> str:
    """Return path and query for the log: of unknown parameters only the name."""
    path = request.rel_url.raw_path[:LONGEST_PATH]
    if not request.rel_url.raw_query_string:
        return path
    pairs = (
        f"{quote(name, safe='[]')}={quote(value) if name in SHOWN_QUERY else MASK}"
        for name, value in request.query.items()
    )
    return f"{path}?{'&'.join(pairs)}"[:LONGEST_PATH]
