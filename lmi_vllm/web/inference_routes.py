"""`/ping`, `/invocations` and `/predictions`: HTTP to service calls, and stream writing."""

import asyncio
import zlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from lmi_vllm.errors import BadParameterError, PayloadError
from lmi_vllm.inference.request.body import check_values, form_field
from lmi_vllm.inference.response.streams import ReplyStream, close_iterator
from lmi_vllm.messages import InferenceCall, Reply
from lmi_vllm.web.connection import RowResponse, RowWriter
from lmi_vllm.web.request import (
    OPTIONS,
    REQUEST_ID,
    SERVICE,
    WRITE_BATCH,
    check_method,
)
from lmi_vllm.web.rerouting import CUSTOM_ATTRIBUTES, without_route

PING_METHODS: Final = ("GET", "HEAD", "POST")
READ_METHODS: Final = ("GET", "HEAD")
CALL_METHODS: Final = ("OPTIONS", "POST")
_NO_QUERY: Final[Mapping[str, str]] = MappingProxyType({})
_WINDOW_BITS: Final = MappingProxyType({"gzip": zlib.MAX_WBITS + 16, "deflate": zlib.MAX_WBITS})
_UNSUPPORTED: Final = ("br", "zstd")
_ZLIB_METHOD: Final = 8  # in the first byte of zlib's form (RFC 1950)
_PIECE: Final = 64 << 10  # bytes at a time
_MAX_STREAMS: Final = 1000  # gzip allows several, and each may be tiny
UNREADABLE_BODY: Final = "the body does not unpack as its Content-Encoding says"


def add_health_routes(app: web.Application) -> None:
    """Register the routes for probes."""
    of_health = health if app[OPTIONS].is_health_liveness else ping
    for path, answer in (("/ping", ping), ("/ready", ping), ("/health", of_health)):
        app.router.add_route("*", path, answer)
    app.router.add_route("*", "/live", live)
    app.router.add_route("*", "/v1/health/ready", ping)  # as charts for NVIDIA's NIM probe
    app.router.add_route("*", "/v1/health/live", live)


def add_inference_routes(app: web.Application) -> None:
    """Register the routes; methods are checked after the model name."""
    app.router.add_route("*", "/invocations", invocations)
    for path in (
        "/predictions/{model}",
        "/predictions/{model}/{version}",
        "/models/{model}/invoke",
    ):
        app.router.add_route("*", path, invocations)


async def ping(request: web.Request) -> web.Response:
    """Answer readiness: 200 after a real token, before that 503 with the phase."""
    check_method(request, PING_METHODS)
    status, body = request.app[SERVICE].lifecycle.ping()
    return json_answer(body, status)


async def health(request: web.Request) -> web.Response:
    """Answer as `vllm serve` does: readiness until the first token, liveness from then on."""
    check_method(request, PING_METHODS)
    status, body = request.app[SERVICE].lifecycle.health()
    return json_answer(body, status)


async def live(request: web.Request) -> web.Response:
    """Answer liveness: 200 while the process can still become ready."""
    check_method(request, PING_METHODS)
    lifecycle = request.app[SERVICE].lifecycle
    return json_answer({"status": str(lifecycle.state)}, 200 if lifecycle.is_alive else 503)


async def invocations(request: web.Request) -> web.StreamResponse:
    """Answer an inference request with any kind of payload."""
    service = request.app[SERVICE]
    properties = request_properties(request.headers)
    name = (
        request.match_info.get("model")
        or request.query.get("model_name")
        or properties.get("model_name")
    )
    service.check_model(name)
    if request.method == "OPTIONS":
        return json_answer({})
    check_method(request, CALL_METHODS)
    if "handler" in properties and not request.app[OPTIONS].allows_handler_override:
        raise BadParameterError("The handler can't be overridden in a request")
    service.expect_room()
    call = await read_call(request, properties)
    default_accept = request.app[OPTIONS].default_accept  # SageMaker's
    if default_accept and call.accept.strip() in ("", "*/*"):
        call = replace(call, accept=default_accept)
    if name is None and "form" in call.content_type.lower():
        name = form_field(call.body, call.content_type, "model_name")
        if name:
            service.check_model(name)
    return await send(request, await service.infer(call))


async def send(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Send `reply`, each row as one chunk; an end of the writing aborts the generation."""
    headers = CIMultiDict(reply.headers)
    if reply.content_type:
        headers["Content-Type"] = reply.content_type
    if reply.stream is None:
        return web.Response(status=reply.status, body=reply.body, headers=headers)
    if request.app[SERVICE].profile.tgi_compat:
        headers.setdefault("X-Accel-Buffering", "no")  # as TGI: nginx passes each row on
    try:
        response = RowResponse(status=reply.status, headers=headers)
        await response.prepare(request)
        writer = RowWriter(request, request.app[WRITE_BATCH])
        if isinstance(reply.stream, ReplyStream):
            reply.stream.connect(writer)
        try:
            async for row in reply.stream:
                writer.write(row)
                if writer.is_paused:
                    await writer.drain()
        finally:
            writer.end()  # also before a failure that cuts the connection
        await response.write_eof()
    finally:
        await close_iterator(reply.stream)
    return response


def request_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers by lower-case name, and each of SageMaker's custom attributes as one."""
    properties: dict[str, str] = {}
    for name, value in headers.items():  # a header may be there twice, and has one key then
        known = name.lower()
        if known == CUSTOM_ATTRIBUTES and known in properties:
            value = f"{properties[known]};{value}"  # noqa: PLW2901 - a list goes on
        properties[known] = value
    if not "".join(properties.values()).isascii():
        properties = {name: _text(value) for name, value in properties.items()}
    if attributes := properties.pop(CUSTOM_ATTRIBUTES, ""):
        for piece in without_route(attributes).split(";"):
            name, separator, value = piece.partition("=")
            if separator:
                properties[name.strip().lower()] = value.strip()
    return properties


def _text(value: str) -> str:
    """Return a header's value as valid text: other bytes become question marks."""
    return value.encode("utf-8", "replace").decode()


def json_answer(document: object, status: int = 200) -> web.Response:
    """Return `document` as JSON with a final newline."""
    body = orjson.dumps(document) + b"\n"
    return web.Response(status=status, body=body, content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """Return the body, unpacked as its Content-Encoding says.

    Raises:
        HTTPRequestEntityTooLarge: it is larger than `max_request_size`, as it came or unpacked.
        PayloadError: it does not unpack, is cut, or is packed in a way that is not supported.
    """
    limit = request.app[OPTIONS].max_request_size
    try:
        body = await _received(request, limit)
    except web.RequestPayloadError as error:
        raise PayloadError(UNREADABLE_BODY) from error
    coding = request.headers.get("Content-Encoding", "").strip().lower().removeprefix("x-")
    if coding in _UNSUPPORTED:
        raise PayloadError(f"Content-Encoding: {coding} is not supported; gzip and deflate are")
    if coding not in _WINDOW_BITS or not body:
        return body
    is_bare = coding == "deflate" and body[0] & 0xF != _ZLIB_METHOD  # sent in place of zlib's form
    bits = -zlib.MAX_WBITS if is_bare else _WINDOW_BITS[coding]
    try:
        return await _unpacked(body, bits, limit)
    except zlib.error as error:
        raise PayloadError(UNREADABLE_BODY) from error


def is_waiting_in_vain(request: web.Request) -> bool:
    """Whether the client asks to send a body that is larger than `max_request_size`."""
    limit = request.app[OPTIONS].max_request_size
    return "Expect" in request.headers and 0 < limit < (request.content_length or 0)


async def _received(request: web.Request, limit: int) -> bytes:
    """Return the body as it came; aiohttp's `read` would keep it as long as the connection."""
    if is_waiting_in_vain(request):
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
    pieces, size, content = [], 0, request.content
    while not content.at_eof() and (piece := await content.readany()):
        pieces.append(piece)
        size += len(piece)
        if limit and size > limit:
            raise web.HTTPRequestEntityTooLarge(limit, size)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _unpacked(body: bytes, bits: int, limit: int) -> bytes:
    """Return the content of a packed body, whose last stream has to end; others run meanwhile."""
    whole, inflater, streams = bytearray(), zlib.decompressobj(bits), 1
    for start in range(0, len(body), _PIECE):
        rest = body[start : start + _PIECE]
        while rest or not inflater.eof:
            if inflater.eof:
                inflater, streams = zlib.decompressobj(bits), streams + 1
            piece = inflater.decompress(rest, _PIECE)
            rest = inflater.unconsumed_tail or inflater.unused_data
            whole += piece
            if len(whole) > limit:
                raise web.HTTPRequestEntityTooLarge(limit)
            if streams > _MAX_STREAMS:
                raise PayloadError(f"the body has more than {_MAX_STREAMS} packed streams")
            if not piece and not rest:
                break
        await asyncio.sleep(0)
    if not inflater.eof:
        raise PayloadError(UNREADABLE_BODY)
    return bytes(whole)


async def read_call(request: web.Request, properties: Mapping[str, str]) -> InferenceCall:
    """Return the call of `request`, with its body.

    Raises:
        PayloadError: see `read_body`, or the body has too many values.
    """
    body = await read_body(request)
    check_values(body)
    return InferenceCall(
        body=body,
        content_type=request.headers.get("Content-Type", ""),
        accept=request.headers.get("Accept", ""),
        properties=properties,
        query=dict(request.query) if request.query_string else _NO_QUERY,
        request_id=request[REQUEST_ID],
    )
