"""The one model: list, describe, register, scale, unregister."""

import logging
from typing import Any, Final

import orjson
from aiohttp import web

from lmi_vllm.errors import (
    BadParameterError,
    ModelConflictError,
    NotReadyError,
    ResourceNotFoundError,
)
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.model_control import NewModel
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.inference_routes import READ_METHODS
from lmi_vllm.web.request import SERVICE, check_method, given_arguments, page_of

logger = logging.getLogger(__name__)

ARGUMENTS: Final = (
    "url",
    "model_name",
    "model_version",
    "engine",
    "device",
    "job_queue_size",
    "batch_size",
    "max_batch_delay",
    "max_idle_time",
    "min_worker",
    "max_worker",
    "synchronous",
)
_WORKERS: Final = ("min_worker", "max_worker")
_OBEYED: Final = ("url", "model_name", "job_queue_size", "synchronous", *_WORKERS)
_MOST_WORKERS: Final = 256  # listed one by one; the counts beside them are as asked
_SHOWN_STATES: Final = {State.HEALTHY: "READY", State.FAILED: "FAILED"}


def add_model_routes(app: web.Application) -> None:
    """Register the routes, after those of adapters, whose paths are longer."""
    app.router.add_route("*", "/models", models)
    app.router.add_route("*", "/models/{model}", one_model)
    app.router.add_route("*", "/models/{model}/{version}", one_model)


async def models(request: web.Request) -> web.Response:
    """List the model, or register one."""
    service = request.app[SERVICE]
    check_method(request, (*READ_METHODS, "POST"))
    if request.method == "POST":
        return await _register(request, service)
    lifecycle = service.lifecycle
    found: list[dict[str, str]] = []
    if lifecycle.has_model:
        status = _SHOWN_STATES.get(lifecycle.state, "PENDING")
        found.append(
            {"modelName": lifecycle.model_name, "modelUrl": service.model.url, "status": status}
        )
    items, token = page_of(found, request.query)
    page: dict[str, Any] = {"models": items}
    return _json(page if token is None else {**page, "nextPageToken": token})


async def one_model(request: web.Request) -> web.Response:
    """Describe, scale or unregister the model."""
    service = request.app[SERVICE]
    name = request.match_info["model"]
    is_ours = service.lifecycle.has_model and name == service.lifecycle.model_name
    if request.method in READ_METHODS:
        if not is_ours:
            raise ResourceNotFoundError(f"Workflow not found: {name}", "ModelNotFoundException")
        return _json([{"workflowName": name, "models": [_description(service)]}])
    is_fixed = is_ours and service.model.is_loaded_at_startup
    changes = ("PUT",) if is_fixed else ("PUT", "DELETE")
    has_version = "version" in request.match_info
    check_method(request, (*READ_METHODS, *(() if has_version else changes)))
    if not is_ours:
        raise ResourceNotFoundError(
            f"Model or workflow not found: {name}", "ModelNotFoundException"
        )
    if request.method == "PUT":
        return _scaled(request, service)
    await service.models.unregister()
    return _json({"status": f'Model or workflow "{name}" unregistered'})


async def _register(request: web.Request, service: InferenceService) -> web.Response:
    given = await given_arguments(request, ARGUMENTS)
    texts = {name: str(value) for name, value in given.items() if value is not None}
    if not texts.get("url"):
        raise BadParameterError("Parameter url is required.")
    _number(texts, "job_queue_size")
    least, most = (_number(texts, name) for name in _WORKERS)
    for name in sorted(set(texts) - set(_OBEYED)):
        logger.warning("POST /models: %.80r has no effect", name)  # a client's text
    is_synchronous = texts.get("synchronous", "true").lower() == "true"
    new = NewModel(texts["url"], texts.get("model_name", ""), is_synchronous, texts)
    _check_name(service, new)
    name = await service.models.register(new)
    if least or most:
        service.show_workers(least, most)
    if is_synchronous:
        return _json({"status": f'Model "{name}" registered.'})
    return _json({"status": f'Model "{name}" registration scheduled.'}, 202)


def _check_name(service: InferenceService, new: NewModel) -> None:
    """Return unless the model is there already.

    Raises:
        ModelConflictError: it is, by its name, or without one by its URL.
    """
    lifecycle = service.lifecycle
    is_there = new.name == lifecycle.model_name or (not new.name and new.url == service.model.url)
    if lifecycle.has_model and is_there:
        raise ModelConflictError(f"Workflow {lifecycle.model_name} is already registered.")


def _scaled(request: web.Request, service: InferenceService) -> web.Response:
    """Answer as if workers had been changed: one engine serves whatever comes."""
    given = dict(request.query)
    least, most = _number(given, "min_worker"), _number(given, "max_worker")
    if service.lifecycle.state is not State.HEALTHY:
        raise NotReadyError(f"Model {service.lifecycle.model_name} is not ready to be scaled")
    service.show_workers(least, most)
    model = service.model
    return _json(
        {
            "status": f'Workflow "{service.lifecycle.model_name}" worker scaled. New Worker '
            f"configuration min workers:{model.min_workers} max workers:{model.max_workers}"
        }
    )


def _number(given: dict[str, str], name: str) -> int | None:
    """Return a whole number, None where it is not given.

    Raises:
        BadParameterError: it is none.
    """
    if name not in given:
        return None
    if not given[name].isdecimal() or len(given[name]) > 9:  # noqa: PLR2004 (fits an int)
        raise BadParameterError(f"Parameter {name}: expected a whole number (got {given[name]})")
    return int(given[name])


def _description(service: InferenceService) -> dict[str, Any]:
    lifecycle, queue, model = service.lifecycle, service.queue, service.model
    is_ready = lifecycle.state is State.HEALTHY
    worker = {"startTime": model.start_time, "status": "READY"}
    shown = min(model.min_workers, _MOST_WORKERS) if is_ready else 0
    group = {
        "device": {"deviceType": model.device_type, "deviceId": 0},
        "minWorkers": model.min_workers,
        "maxWorkers": model.max_workers,
        "workers": [{"id": number + 1, **worker} for number in range(shown)],
    }
    return {
        "modelName": lifecycle.model_name,
        "modelUrl": model.url,
        "batchSize": model.batch_size,
        "maxBatchDelayMillis": model.max_batch_delay,
        "maxIdleSeconds": model.max_idle_time,
        "queueSize": queue.limit,
        "requestInQueue": queue.in_flight,
        "status": str(State.UNHEALTHY if lifecycle.state is State.DRAINING else lifecycle.state),
        "loadedAtStartup": model.is_loaded_at_startup,
        "workerGroups": [group],
    }


def _json(document: object, status: int = 200) -> web.Response:
    body = orjson.dumps(document) + b"\n"
    return web.Response(body=body, status=status, content_type="application/json")
