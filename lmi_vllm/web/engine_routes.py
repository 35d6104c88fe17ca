"""Routes of the engine's own HTTP application, which this server has none of its own for."""

from aiohttp import web

from lmi_vllm.errors import (
    ResourceNotFoundError,
    UnauthorizedError,
)
from lmi_vllm.messages import HttpCall, HttpRoute, RouteKind
from lmi_vllm.web.inference_routes import json_answer, read_call, request_properties, send
from lmi_vllm.web.request import DIALECT, OPTIONS, RECORD, REQUEST_ID, SERVICE, Routes, check_method

_VERSIONED = ("/v1/", "/v2/")  # where such routes are: before there is a model none is known


async def engine_route(request: web.Request) -> web.StreamResponse:
    """Let the engine's application answer, where it has such a route.

    Raises:
        ResourceNotFoundError: it has none, or not for this listener.
    """
    service = request.app[SERVICE]
    route = service.find_route(request.method, request.path)
    if route is None:
        if service.loaded_engine is None and request.path.startswith(_VERSIONED):
            service.lifecycle.check_ready()
        raise ResourceNotFoundError
    request[DIALECT], request[RECORD].dialect = route.dialect, str(route.dialect)
    request[RECORD].route = route.path
    _check(request, route)
    if request.method == "OPTIONS":
        return json_answer({})
    if route.kind is RouteKind.INFERENCE:
        service.expect_room()
    call = await read_call(request, request_properties(request.headers))
    http = HttpCall(
        method="GET" if request.method == "HEAD" else request.method,
        path=request.path,
        query_string=request.rel_url.raw_query_string,
        headers=request.headers,
        body=call.body,
        request_id=request[REQUEST_ID],
    )
    return await send(request, await service.forward(call, http, route))


def _check(request: web.Request, route: HttpRoute) -> None:
    """Return where this listener has the route, and where its method is one of the route's.

    What acts on the server belongs to the management address, and needs a key in any case.
    """
    options = request.app[OPTIONS]
    is_management = route.kind is RouteKind.MANAGEMENT
    if options.routes is (Routes.INFERENCE if is_management else Routes.MANAGEMENT):
        raise ResourceNotFoundError
    reading = {"HEAD"} if "GET" in route.methods else set()
    check_method(request, {*route.methods, *reading, "OPTIONS"})
    if is_management and not options.api_keys:
        raise UnauthorizedError(
            f"{route.path} acts on the server: set LMI_API_KEY, and send the key with the request"
        )
