"""`/ping`, `/invocations`, `/predictions` and `/v1`: HTTP to service calls, and stream writing."""

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from lmi_vllm.errors import BadParameterError, MethodNotAllowedError
from lmi_vllm.inference.admission import State
from lmi_vllm.inference.streams import close_iterator
from lmi_vllm.messages import InferenceCall, Reply
from lmi_vllm.web.keys import REQUEST_ID, SERVICE

CUSTOM_ATTRIBUTES: Final = "x-amzn-sagemaker-custom-attributes"
OPENAI_KINDS: Final = ("chat/completions", "completions")
PING_METHODS: Final = ("GET", "HEAD", "POST")


def add_inference_routes(app: web.Application) -> None:
    """Register the routes; methods are checked after the model name (http-api.md 1)."""
    for path in ("/ping", "/ready", "/health"):
        app.router.add_route("*", path, ping)
    app.router.add_get("/live", live)
    app.router.add_route("*", "/invocations", invocations)
    for path in (
        "/predictions/{model}",
        "/predictions/{model}/{version}",
        "/models/{model}/invoke",
    ):
        app.router.add_route("*", path, invocations)
    for kind in OPENAI_KINDS:
        app.router.add_post(f"/v1/{kind}", openai)
    app.router.add_get("/v1/models", openai)


async def ping(request: web.Request) -> web.Response:
    """Answer health: 200 only after a real token, 503 with the phase before."""
    if request.method not in PING_METHODS:
        raise MethodNotAllowedError
    status, body = request.app[SERVICE].admission.ping()
    text = web.json_response(body, status=status)
    text.text = f"{text.text}\n"
    return text


async def live(request: web.Request) -> web.Response:
    """Answer liveness: 200 while the process can still become ready."""
    state = request.app[SERVICE].admission.state
    return web.json_response({"status": str(state)}, status=503 if state is State.FAILED else 200)


async def invocations(request: web.Request) -> web.StreamResponse:
    """Answer an inference request of any payload family."""
    service = request.app[SERVICE]
    properties = request_properties(request.headers)
    service.check_model(
        request.match_info.get("model")
        or request.query.get("model_name")
        or properties.get("model_name")
    )
    if request.method == "OPTIONS":
        return web.json_response({}, dumps=lambda body: f"{body}\n")
    if request.method != "POST":
        raise MethodNotAllowedError
    if "handler" in properties:
        raise BadParameterError("The handler can't be overridden in a request")
    reply = await service.infer(await _call(request, properties))
    return await send(request, reply)


async def openai(request: web.Request) -> web.StreamResponse:
    """Answer a `/v1` route with vLLM's own bytes."""
    kind = request.path.removeprefix("/v1/")
    call = await _call(request, request_properties(request.headers))
    return await send(request, await request.app[SERVICE].answer_openai(call, kind))


async def send(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Write `reply`, each row as one chunk; whatever ends the writing aborts the generation."""
    headers = {**reply.headers, "Content-Type": reply.content_type}
    if reply.stream is None:
        return web.Response(status=reply.status, body=reply.body, headers=headers)
    try:
        response = web.StreamResponse(status=reply.status, headers=headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        async for row in reply.stream:
            await response.write(row)
        await response.write_eof()
    finally:
        await close_iterator(reply.stream)
    return response


def request_properties(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers by lower-case name, SageMaker's custom attributes split into theirs."""
    properties = {name.lower(): value for name, value in headers.items()}
    for piece in properties.pop(CUSTOM_ATTRIBUTES, "").split(";"):
        name, separator, value = piece.partition("=")
        if separator:
            properties[name.strip().lower()] = value.strip()
    return properties


async def _call(request: web.Request, properties: Mapping[str, str]) -> InferenceCall:
    return InferenceCall(
        body=await request.read(),
        content_type=request.headers.get("Content-Type", ""),
        accept=request.headers.get("Accept", ""),
        properties=properties,
        query=dict(request.query),
        request_id=request[REQUEST_ID],
    )
