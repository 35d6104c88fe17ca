"""Models, adapters and metrics: HTTP to calls (http-api.md 10, adapters-api.md 4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from lmi_vllm.errors import (
    BadParameterError,
    MethodNotAllowedError,
    ResourceNotFoundError,
)
from lmi_vllm.inference.adapters import Adapter, AdapterRegistry
from lmi_vllm.inference.admission import State
from lmi_vllm.inference.service import ADAPTER_ALIAS_HEADER, InferenceService
from lmi_vllm.web.keys import SERVICE

PAGE_SIZE: Final = 100
ADAPTER_FIELDS: Final = ("name", "src", "preload", "pin")


def add_management_routes(app: web.Application) -> None:
    """Register the routes, the adapters' under both prefixes."""
    app.router.add_get("/models", list_models)
    app.router.add_get("/models/{model}", describe_model)
    for prefix in ("/adapters", "/models/{model}/adapters"):
        app.router.add_route("*", prefix, adapters)
        app.router.add_route("*", prefix + "/{name}", one_adapter)
        app.router.add_route("*", prefix + "/{name}/{action}", adapter_action)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/server/metrics", metrics)


async def metrics(_: web.Request) -> web.Response:
    """Answer with every series of the process, vLLM's among them, as Prometheus text."""
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def list_models(request: web.Request) -> web.Response:
    """Answer with the one model, if there is one."""
    service = request.app[SERVICE]
    admission = service.admission
    models: list[dict[str, Any]] = []
    if admission.has_model:
        status = {State.HEALTHY: "READY", State.FAILED: "FAILED"}.get(admission.state, "PENDING")
        models.append(
            {"modelName": admission.model_name, "modelUrl": service.model_url, "status": status}
        )
    return _json({"models": models})


async def describe_model(request: web.Request) -> web.Response:
    """Answer with the model's description in the shape of upstream's."""
    service = request.app[SERVICE]
    admission = service.admission
    name = request.match_info["model"]
    if not admission.has_model or name != admission.model_name:
        raise ResourceNotFoundError(f"Workflow not found: {name}", "ModelNotFoundException")
    model = {
        "modelName": name,
        "modelUrl": service.model_url,
        "batchSize": 1,
        "maxBatchDelayMillis": 100,
        "maxIdleSeconds": 60,
        "queueSize": admission.limit,
        "requestInQueue": admission.in_flight,
        "status": str(admission.state),
        "loadedAtStartup": True,
        "workerGroups": [],
    }
    return _json([{"workflowName": name, "models": [model]}])


async def adapters(request: web.Request) -> web.Response:
    """List adapters, or register one."""
    service = _adapter_service(request)
    if request.method == "GET":
        return _page(service.runtime.adapters, request.query)
    if request.method != "POST":
        raise MethodNotAllowedError
    given = await _arguments(request)
    for name in ("name", "src"):
        if not given.get(name):
            raise BadParameterError(f"The parameter {name} is required")
    adapter = Adapter(
        name=str(given["name"]),
        src=str(given["src"]),
        preload=_flag(given.get("preload", True)),
        pin=_flag(given.get("pin", False)),
    )
    await _registry(service).register(adapter, _alias(request))
    return _json({"status": f"Adapter {_alias(request) or adapter.name} registered"})


async def one_adapter(request: web.Request) -> web.Response:
    """Describe or unregister an adapter."""
    service = _adapter_service(request)
    name, alias = request.match_info["name"], _alias(request)
    if request.method == "GET":
        return _json(_shown(service.runtime.adapters.describe(name, alias)))
    if request.method != "DELETE":
        raise MethodNotAllowedError
    await _registry(service).unregister(name, service.profile.predict_timeout, alias)
    return _json({"status": f"Adapter {alias or name} unregistered"})


async def adapter_action(request: web.Request) -> web.Response:
    """Update an adapter: the one action there is."""
    service = _adapter_service(request)
    if request.match_info["action"].lower() != "update":
        raise ResourceNotFoundError
    if request.method != "POST":
        raise MethodNotAllowedError
    name, alias = request.match_info["name"], _alias(request)
    registry = _registry(service)
    current = registry.describe(name, alias)
    given = await _arguments(request)
    wanted = replace(
        current,
        src=str(given.get("src", current.src)),
        preload=_flag(given.get("preload", current.preload)),
        pin=_flag(given.get("pin", current.pin)),
    )
    await registry.update(name, wanted, service.profile.predict_timeout, alias)
    return _json({"status": f"Adapter {alias or name} updated"})


def _adapter_service(request: web.Request) -> InferenceService:
    """Return the service once the model in the path is known to be ours; checked first."""
    service = request.app[SERVICE]
    model = request.match_info.get("model")
    if model is None and not service.admission.has_model:
        raise BadParameterError(
            "The adapter must be prefixed with a model unless there is only a single startup "
            "model used."
        )
    if model is not None and model != service.admission.model_name:
        raise ResourceNotFoundError(f"The model {model} was not found", "BadRequestException")
    return service


def _registry(service: InferenceService) -> AdapterRegistry:
    return service.runtime.adapters


async def _arguments(request: web.Request) -> Mapping[str, Any]:
    """Return query parameters over the fields of a JSON body."""
    body = await request.read()
    fields: dict[str, Any] = {}
    if body:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadParameterError(f"The body is not valid JSON: {error}") from None
        if not isinstance(fields, dict):
            raise BadParameterError("The body must be a JSON object")
    return {**fields, **request.query}


def _flag(value: object) -> bool:
    """Read upstream's booleans: true in any case is true, everything else false."""
    return str(value).lower() == "true"


def _alias(request: web.Request) -> str | None:
    return request.headers.get(ADAPTER_ALIAS_HEADER)


def _shown(adapter: Adapter) -> dict[str, Any]:
    return {name: getattr(adapter, name) for name in ADAPTER_FIELDS}


def _page(registry: AdapterRegistry, query: Mapping[str, str]) -> web.Response:
    try:
        limit = int(query.get("limit", PAGE_SIZE))
        offset = int(query.get("next_page_token", 0))
    except ValueError:
        raise BadParameterError("limit and next_page_token must be whole numbers") from None
    if not 0 <= limit <= PAGE_SIZE:
        limit = PAGE_SIZE
    found = list(registry)
    page: dict[str, Any] = {"adapters": [_shown(item) for item in found[offset : offset + limit]]}
    if offset + limit < len(found):
        page["nextPageToken"] = str(offset + limit)
    return _json(page)


def _json(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document) + b"\n", content_type="application/json")
