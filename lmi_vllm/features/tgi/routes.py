"""TGI's own routes, with `tgi_compat` only: `/`, `/generate`, `/generate_stream` and `/info`.

`/tokenize` is one route for TGI's bodies and vLLM's: only a body says whose it is.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import Dialect, ResourceNotFoundError
from lmi_vllm.features.tgi.answers import chat_tokenize, describe, is_tokenize_body, tokenize
from lmi_vllm.messages import ServingProfile, TgiRoute
from lmi_vllm.web.engine_routes import engine_route
from lmi_vllm.web.inference_routes import (
    CALL_METHODS,
    READ_METHODS,
    json_answer,
    read_call,
    request_properties,
    send,
)
from lmi_vllm.web.management_routes import front_page
from lmi_vllm.web.request import DIALECT, OPTIONS, RECORD, SERVICE, RouteGroup, Routes, check_method

_LOG: Final = logging.getLogger(__name__)
_SAID: Final = web.AppKey("tgi_paths_without_tgi_compat", set[str])

ROOT: Final = "/"
GENERATE: Final[Mapping[str, TgiRoute]] = MappingProxyType(
    {
        ROOT: TgiRoute(is_streaming=None, is_wrapped=True),
        "/generate": TgiRoute(is_streaming=False, is_wrapped=False),
        "/generate_stream": TgiRoute(is_streaming=True, is_wrapped=False),
    }
)
INFO: Final = "/info"
TOKENIZE: Final = "/tokenize"
CHAT_TOKENIZE: Final = "/chat_tokenize"


def _add(app: web.Application) -> None:
    """Register the routes; without `tgi_compat` they are as if they were not there."""
    if app[OPTIONS].routes is Routes.MANAGEMENT:
        return
    app[_SAID] = set()
    for path, route in GENERATE.items():
        app.router.add_route("*", path, generate_handler(route, path))
    app.router.add_route("*", INFO, info)
    app.router.add_route("*", TOKENIZE, tokenize_handler())
    app.router.add_route("*", CHAT_TOKENIZE, tokenize_chat)


def generate_handler(route: TgiRoute, path: str) -> Handler:
    """Return the handler of one generating route; GET of `/` is the front page."""
    methods = (*CALL_METHODS, *READ_METHODS) if path == ROOT else CALL_METHODS

    async def handler(request: web.Request) -> web.StreamResponse:
        if path == ROOT and (not _is_tgi(request) or request.method in READ_METHODS):
            return await front_page(request)
        if not _is_tgi(request):
            return await not_found(request)
        if request.method == "OPTIONS":
            return json_answer({})
        check_method(request, methods)
        service = request.app[SERVICE]
        service.expect_room()
        call = await read_call(request, request_properties(request.headers))
        reply = await service.infer(replace(call, tgi_route=route))
        return await send(request, reply)

    return handler


async def not_found(request: web.Request) -> web.Response:
    """Raise `ResourceNotFoundError`: without `tgi_compat` the path does not exist.

    The answer is that of any such path, so the log says what is missing, once for each path.
    """
    if (path := request.path) not in (said := request.app[_SAID]):
        said.add(path)
        _LOG.warning(
            "%s is a route of Text Generation Inference: start with option.tgi_compat=true "
            "(OPTION_TGI_COMPAT=true) to answer it",
            path,
        )
    raise ResourceNotFoundError


async def info(request: web.Request) -> web.Response:
    """Answer TGI's description of the model and its limits."""
    if not _is_tgi(request):
        return await not_found(request)
    check_method(request, READ_METHODS)
    service = request.app[SERVICE]
    return json_answer(describe(mask_urls(service.model_url), service.runtime))


async def tokenize_chat(request: web.Request) -> web.StreamResponse:
    """Answer the tokens of a chat."""
    if not _is_tgi(request):
        return await not_found(request)
    check_method(request, ("POST",))
    call = await read_call(request, request_properties(request.headers))
    async with request.app[SERVICE].admitted(call) as context:
        reply = await chat_tokenize(context)
    return await send(request, reply)


def tokenize_handler() -> Handler:
    """Return the handler of `/tokenize`: TGI's bodies here, vLLM's by the core."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if not _is_tgi(request) or request.method != "POST":
            return await engine_route(request)
        call = await read_call(request, request_properties(request.headers))
        if not is_tokenize_body(call.body):
            return await engine_route(request, call)
        request[DIALECT] = Dialect.TGI
        request[RECORD].dialect = Dialect.TGI
        async with request.app[SERVICE].admitted(call) as context:
            reply = await tokenize(context)
        return await send(request, reply)

    return handler


def _is_tgi(request: web.Request) -> bool:
    return request.app[SERVICE].profile.tgi_compat


def _dialect_of(path: str, profile: ServingProfile) -> Dialect | None:
    if path == TOKENIZE:
        return Dialect.OPENAI  # until a body says that it is TGI's
    return Dialect.TGI if profile.tgi_compat and path in (*GENERATE, INFO, CHAT_TOKENIZE) else None


GROUP: Final = RouteGroup(
    _add, dialect_of=_dialect_of, is_shared={*GENERATE, TOKENIZE, CHAT_TOKENIZE}.__contains__
)
