"""`/v2`: KServe's health, metadata and inference, over the service behind `/invocations`.

Keys, queue, adapters, hooks, limits, metrics and the request log are those of `/invocations`.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
from aiohttp import web

from lmi_vllm._version import __version__
from lmi_vllm.errors import Dialect, PayloadError, ResourceNotFoundError
from lmi_vllm.features.kserve.translation import (
    ANSWER,
    EMBEDDING,
    HEADER_LENGTH,
    TEXT,
    infer_answer,
    output_tensors,
    read_request,
)
from lmi_vllm.inference.request.body import MAX_DEPTH
from lmi_vllm.inference.response.streams import close_iterator
from lmi_vllm.messages import GENERATE, Reply
from lmi_vllm.web.inference_routes import json_answer, read_call, request_properties
from lmi_vllm.web.request import OPTIONS, RECORD, SERVICE, RouteGroup, Routes

PREFIX: Final = "/v2"
PLATFORM: Final = "vllm"
_JSON: Final = "application/json"
_JSON_LINES: Final = "application/jsonlines"  # of a server that streams whatever is asked
# Properties of `/invocations` that choose another form of response; this protocol has one form.
_IGNORED_PROPERTIES: Final = ("handler", "x-synchronous", "x-starting-token")
_SUCCESS: Final = 200
_FAILED: Final = 500


async def live(request: web.Request) -> web.Response:
    """Answer liveness: 200 while the process can still become ready."""
    is_live = request.app[SERVICE].lifecycle.is_alive
    return json_answer({"live": is_live}, 200 if is_live else 503)


async def ready(request: web.Request) -> web.Response:
    """Answer readiness, with the status of `/ping`."""
    status, _ = request.app[SERVICE].lifecycle.ping()
    return json_answer({"ready": status == _SUCCESS}, status)


async def server(request: web.Request) -> web.Response:
    """Describe the server."""
    return json_answer(
        {"name": "lmi_vllm", "version": __version__, "extensions": ["binary_tensor_data"]}
    )


def _model_of(request: web.Request) -> str:
    """Return the model that the path names.

    Raises:
        ResourceNotFoundError: it is not served; the words are those of LMI's plug-in.
    """
    name = request.match_info["model"]
    try:
        request.app[SERVICE].check_model(name)
    except ResourceNotFoundError as error:
        raise ResourceNotFoundError(f"Model not found: {name}", error.kind) from None
    return name


async def model(request: web.Request) -> web.Response:
    """Describe the model's tensors: texts in; texts, vectors or a JSON answer out."""
    service = request.app[SERVICE]
    name = _model_of(request)
    shape = {"datatype": "BYTES", "shape": [-1]}
    outputs: list[dict[str, Any]] = [{"name": ANSWER, **shape}]
    if service.profile.task == GENERATE:
        outputs = [{"name": TEXT, **shape}]
    elif service.profile.task == "embed":
        outputs = [{"name": EMBEDDING, "datatype": "FP32", "shape": [-1, -1]}]
    return json_answer(
        {
            "name": name,
            "platform": PLATFORM,
            "inputs": [{"name": "inputs", **shape}],
            "outputs": outputs,
        }
    )


async def model_ready(request: web.Request) -> web.Response:
    """Answer the model's readiness: 200 while it serves, else 503."""
    service = request.app[SERVICE]
    name = _model_of(request)
    is_ready = service.lifecycle.is_ready
    return json_answer({"name": name, "ready": is_ready}, 200 if is_ready else 503)


async def infer(request: web.Request) -> web.Response:
    """Answer an inference request: texts to texts, or to vectors."""
    service = request.app[SERVICE]
    name = _model_of(request)
    request[RECORD].dialect = Dialect.KSERVE
    service.expect_room()
    call = await read_call(request, _properties(request.headers))
    length = request.headers.get(HEADER_LENGTH)
    wanted = read_request(call.body, length, request.headers.get("Content-Type", ""))
    try:
        payload = orjson.dumps(wanted.payload)
    except orjson.JSONEncodeError:  # it reads more levels than it writes
        raise PayloadError(f"parameters: they may nest at most {MAX_DEPTH} levels") from None
    call = replace(call, body=payload, content_type=_JSON, accept=_JSON_LINES)
    reply = await _without_stream(await service.infer(call))
    if reply.status != _SUCCESS:
        text = error_body(_reason(reply.body))
        return web.Response(status=reply.status, body=text, content_type=_JSON)
    head = {"model_name": name, "id": wanted.id or call.request_id}
    answer, header_length = infer_answer(head, output_tensors(reply.body), wanted)
    if header_length is None:
        return web.Response(body=answer, content_type=_JSON)
    headers = {HEADER_LENGTH: str(header_length)}
    return web.Response(body=answer, headers=headers, content_type="application/octet-stream")


def error_body(text: str) -> bytes:
    """Return the protocol's error object."""
    return orjson.dumps({"error": text})


def is_open(route: str) -> bool:
    """Whether a route needs no API key: those of liveness and readiness probes."""
    return route.startswith(f"{PREFIX}/health/") or route.endswith("/ready")


def _properties(headers: Mapping[str, str]) -> dict[str, str]:
    properties = request_properties(headers)
    return {name: text for name, text in properties.items() if name not in _IGNORED_PROPERTIES}


async def _without_stream(reply: Reply) -> Reply:
    """Return the reply with its stream read; the body is the last row, with the text or error."""
    if reply.stream is None:
        return reply
    try:
        rows = b"".join([row async for row in reply.stream]).split(b"\n")
    finally:
        await close_iterator(reply.stream)
    body = next((row for row in reversed(rows) if row), b"{}")
    with contextlib.suppress(orjson.JSONDecodeError, TypeError, ValueError):
        row = orjson.loads(body)
        if "error" in row:
            return Reply(int(row.get("code", _FAILED)), _JSON, body)
    return Reply(reply.status, _JSON, body)


def _reason(body: bytes) -> str:
    """Return the message of an error reply, in vLLM's form or in that of user code."""
    try:
        error = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    for name in ("error", "message"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return error if isinstance(error, str) else orjson.dumps(error).decode()


def _add(app: web.Application) -> None:
    if app[OPTIONS].routes is Routes.MANAGEMENT:
        return
    app.router.add_get(PREFIX, server)
    app.router.add_get(f"{PREFIX}/health/live", live)
    app.router.add_get(f"{PREFIX}/health/ready", ready)
    for path in (f"{PREFIX}/models/{{model}}", f"{PREFIX}/models/{{model}}/versions/{{version}}"):
        app.router.add_get(path, model)
        app.router.add_get(f"{path}/ready", model_ready)
        app.router.add_post(f"{path}/infer", infer)


def _is_shared(path: str) -> bool:
    return path.startswith(f"{PREFIX}/models/") and path.endswith("/infer")


GROUP: Final = RouteGroup(
    _add,
    prefix=PREFIX,
    is_open=is_open,
    allows_cors=True,
    error_body=error_body,
    error_dialect=Dialect.KSERVE,
    is_shared=_is_shared,
)
