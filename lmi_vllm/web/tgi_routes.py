"""TGI's own routes, with `tgi_compat` only: `/`, `/generate`, `/generate_stream` and `/info`.

`/tokenize` is one route for TGI's bodies and vLLM's; the service tells them apart.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from lmi_vllm.errors import ResourceNotFoundError
from lmi_vllm.inference.tgi import describe
from lmi_vllm.messages import TgiRoute
from lmi_vllm.web.inference_routes import (
    CALL_METHODS,
    READ_METHODS,
    json_answer,
    read_call,
    request_properties,
    send,
)
from lmi_vllm.web.request import SERVICE, check_method

ROOT: Final = "/"
GENERATE: Final[Mapping[str, TgiRoute]] = MappingProxyType(
    {
        ROOT: TgiRoute(is_streaming=None, is_wrapped=True),
        "/generate": TgiRoute(is_streaming=False, is_wrapped=False),
        "/generate_stream": TgiRoute(is_streaming=True, is_wrapped=False),
    }
)
INFO: Final = "/info"


def add_tgi_routes(app: web.Application) -> None:
    """Register the routes; without `tgi_compat` they are not found."""
    for path, route in GENERATE.items():
        app.router.add_route("*", path, generate_handler(route))
    app.router.add_route("*", INFO, info)


def generate_handler(route: TgiRoute) -> Handler:
    """Return what answers one of the generating routes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.method == "OPTIONS" and request.path == ROOT:
            return json_answer({})  # in every mode
        _check_mode(request)
        if request.method == "OPTIONS":
            return json_answer({})
        check_method(request, CALL_METHODS)
        service = request.app[SERVICE]
        service.expect_room()
        call = await read_call(request, request_properties(request.headers))
        reply = await service.infer(replace(call, tgi_route=route))
        return await send(request, reply)

    return handler


async def info(request: web.Request) -> web.Response:
    """Answer what TGI's clients ask about the model and its limits."""
    _check_mode(request)
    check_method(request, READ_METHODS)
    service = request.app[SERVICE]
    return json_answer(describe(service.model.url, service.runtime))


def _check_mode(request: web.Request) -> None:
    if not request.app[SERVICE].profile.tgi_compat:
        raise ResourceNotFoundError
