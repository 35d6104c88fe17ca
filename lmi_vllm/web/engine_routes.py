"""The engine's OpenAI routes, and all others of its own HTTP application.

Completions and chat have a lane of their own. Bodies that the lane would read or refuse in another
way go to the application, so every answer is the engine's.
"""

from aiohttp import web
from aiohttp.typedefs import Handler

from lmi_vllm.errors import ResourceNotFoundError, UnauthorizedError
from lmi_vllm.inference.engine_routes import plain_payload
from lmi_vllm.inference.pipeline import ask
from lmi_vllm.inference.service import InferenceService, reached_by
from lmi_vllm.messages import HttpCall, HttpRoute, InferenceCall, RouteKind
from lmi_vllm.web.inference_routes import (
    READ_METHODS,
    read_call,
    request_properties,
    send,
)
from lmi_vllm.web.request import (
    DIALECT,
    OPENAI_ROUTES,
    OPTIONS,
    RECORD,
    REQUEST_ID,
    SERVICE,
    Routes,
    check_method,
    is_signal,
    matched_route,
)

_VERSIONED = ("/v1/", "/v2/")  # prefixes of such routes: before there is a model none is known

_NO_WEBSOCKETS = (  # vLLM has one, for models that transcribe live speech
    "This server has no WebSockets, /v1/realtime among them: a sound goes to "
    "/v1/audio/transcriptions as a whole, whose text may be streamed"
)


def add_openai_routes(app: web.Application) -> None:
    """Register the routes with a lane of their own, and the list of models."""
    add_list_of_models(app)
    for path, kind in OPENAI_ROUTES.items():
        if kind != "models":
            app.router.add_route("*", path, _lane(kind))


def add_list_of_models(app: web.Application) -> None:
    """Register the list of models."""
    app.router.add_route("*", "/v1/models", _models)


async def _models(request: web.Request) -> web.StreamResponse:
    """List the served names and the adapters, which the application does not know."""
    service = request.app[SERVICE]
    if request.method != "GET" and service.find_route("GET", request.path):
        return await engine_route(request)
    check_method(request, READ_METHODS)
    call = await read_call(request, request_properties(request.headers))
    return await send(request, await service.list_models(call))


def _lane(kind: str) -> Handler:
    """Return the handler of one of the two routes, which answers with the engine's own bytes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        service = request.app[SERVICE]
        if request.method != "POST":
            if service.find_route("POST", request.path):
                return await engine_route(request)
            check_method(request, ("POST",))
        service.expect_room()
        call = await read_call(request, request_properties(request.headers))
        service.queue.check_room()  # others may have come with the body: refuse before parsing
        payload = None if service.sees_every_request else plain_payload(call)
        if payload is None and (route := service.find_route("POST", request.path)):
            return await _hand_on(request, service, call, route)
        async with service.admitted(call) as context:
            reply = context.deliver(await ask(context, kind, payload))
        return await send(request, reply)

    return handler


async def engine_route(
    request: web.Request, call: InferenceCall | None = None
) -> web.StreamResponse:
    """Forward the request to the engine's application, if it has such a route.

    `call` is the request, if it was read before: a body can be read only once.

    Raises:
        ResourceNotFoundError: it has none, or not for this listener.
    """
    service = request.app[SERVICE]
    route = matched_route(request)
    if route is None:
        if service.loaded_engine is None and request.path.startswith(_VERSIONED):
            service.lifecycle.check_ready()
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise ResourceNotFoundError(_NO_WEBSOCKETS)
        raise ResourceNotFoundError
    request[DIALECT], request[RECORD].dialect = route.dialect, route.dialect
    request[RECORD].route = route.path
    _check(request, route)
    if route.kind is RouteKind.INFERENCE and request.method in route.methods:
        service.expect_room(reached_by(route))
    if call is None:
        call = await read_call(request, request_properties(request.headers))
    return await _hand_on(request, service, call, route)


async def _hand_on(
    request: web.Request, service: InferenceService, call: InferenceCall, route: HttpRoute
) -> web.StreamResponse:
    http = HttpCall(
        method=request.method,
        path=request.path,
        query_string=request.rel_url.raw_query_string,
        headers=request.raw_headers,
        body=call.body,
        request_id=request[REQUEST_ID],
    )
    return await send(request, await service.forward(call, http, route))


def _check(request: web.Request, route: HttpRoute) -> None:
    """Return if this listener has the route; the application refuses a wrong method.

    Routes that act on the server are on the management address, and always need a key. Open signals
    are on both.
    """
    options = request.app[OPTIONS]
    is_management = route.kind is RouteKind.MANAGEMENT
    missing = Routes.INFERENCE if is_management else Routes.MANAGEMENT
    if options.routes is missing and not is_signal(request):
        raise ResourceNotFoundError
    if is_management and not options.api_keys:
        raise UnauthorizedError(
            f"{route.path} acts on the server: set LMI_API_KEY, and send the key with the request"
        )
