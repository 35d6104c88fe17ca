"""The one model: list and describe it, register, scale and unregister it; and the log level."""

import logging
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import (
    BadParameterError,
    NotReadyError,
    ResourceNotFoundError,
)
from lmi_vllm.features.management.managed_model import (
    ModelCapacityError,
    ModelConflictError,
    managed_model,
)
from lmi_vllm.features.management.requests import given_arguments, page_answer
from lmi_vllm.features.management.slot import NewModel, model_slot
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import LOG_LEVELS
from lmi_vllm.web.inference_routes import READ_METHODS, json_answer
from lmi_vllm.web.request import (
    OPTIONS,
    SERVICE,
    RouteGroup,
    Routes,
    check_method,
)

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
_MAX_WORKERS: Final = 256  # listed one by one; the counts beside them are as asked
_EFFECTIVE: Final = ("url", "model_name", "job_queue_size", "synchronous", *_WORKERS)


def _add(app: web.Application) -> None:
    if app[OPTIONS].routes is Routes.INFERENCE:
        return
    app.router.add_route("*", "/models", models)
    app.router.add_route("*", "/models/{model}", one_model)
    app.router.add_route("*", "/models/{model}/{version}", one_version)
    app.router.add_post("/server/logging", set_log_level)


GROUP: Final = RouteGroup(_add, pages=MappingProxyType({"/models": "the model"}))


async def models(request: web.Request) -> web.Response:
    """List the model, or register one."""
    service = request.app[SERVICE]
    check_method(request, (*READ_METHODS, "POST"))
    if request.method == "POST":
        return await _register(request, service)
    lifecycle = service.lifecycle
    found: list[dict[str, str]] = []
    if lifecycle.has_model:
        status = "FAILED" if lifecycle.state is State.FAILED else "PENDING"
        status = "READY" if lifecycle.takes_requests else status
        url = mask_urls(service.model_url)
        found.append({"modelName": lifecycle.model_name, "modelUrl": url, "status": status})
    return page_answer("models", found, request.query)


async def one_version(request: web.Request) -> web.Response:
    """Describe the model: whatever the version, it is the one there is."""
    check_method(request, READ_METHODS)
    service, name = request.app[SERVICE], request.match_info["model"]
    if not _is_served(service, name):
        raise ResourceNotFoundError(f"Workflow not found: {name}", "ModelNotFoundException")
    return json_answer([{"workflowName": name, "models": [_description(service)]}])


async def one_model(request: web.Request) -> web.Response:
    """Describe, scale (PUT) or unregister (DELETE) the model."""
    if request.method in READ_METHODS:
        return await one_version(request)
    service = request.app[SERVICE]
    name = request.match_info["model"]
    model = managed_model(service)
    is_ours = _is_served(service, name)
    is_fixed = is_ours and model.shown.is_loaded_at_startup
    check_method(request, (*READ_METHODS, "PUT", *(() if is_fixed else ("DELETE",))))
    if not is_ours:
        raise ResourceNotFoundError(
            f"Model or workflow not found: {name}", "ModelNotFoundException"
        )
    if request.method == "PUT":
        return _scaled(request, service)
    if (slot := model_slot(service)) is None:
        raise ModelCapacityError("the model this server was started with cannot be unregistered")
    await slot.unregister()
    return json_answer({"status": f'Model or workflow "{name}" unregistered'})


def _is_served(service: InferenceService, name: str) -> bool:
    """Whether that is the name of the model, if there is one."""
    return service.lifecycle.has_model and name == service.lifecycle.model_name


def _description(service: InferenceService) -> dict[str, Any]:
    lifecycle, queue, model = service.lifecycle, service.queue, managed_model(service).shown
    is_ready = lifecycle.state is State.HEALTHY
    worker = {"startTime": model.start_time, "status": "READY"}
    shown = min(model.min_workers, _MAX_WORKERS) if is_ready else 0
    group = {
        "device": {"deviceType": model.device_type, "deviceId": 0},
        "minWorkers": model.min_workers,
        "maxWorkers": model.max_workers,
        "workers": [{"id": number + 1, **worker} for number in range(shown)],
    }
    return {
        "modelName": lifecycle.model_name,
        "modelUrl": mask_urls(service.model_url),
        "batchSize": model.batch_size,
        "maxBatchDelayMillis": model.max_batch_delay,
        "maxIdleSeconds": model.max_idle_time,
        "queueSize": queue.limit,
        "requestInQueue": queue.in_flight,
        "status": str(State.UNHEALTHY if lifecycle.state is State.DRAINING else lifecycle.state),
        "loadedAtStartup": model.is_loaded_at_startup,
        "workerGroups": [group],
    }


async def _register(request: web.Request, service: InferenceService) -> web.Response:
    given = await given_arguments(request, ARGUMENTS)
    texts = {name: str(value) for name, value in given.items() if value is not None}
    if not texts.get("url"):
        raise BadParameterError("Parameter url is required.")
    _number(texts, "job_queue_size")
    least, most = (_number(texts, name) for name in _WORKERS)
    for name in sorted(set(texts) - set(_EFFECTIVE)):
        logger.warning("POST /models: %.80r has no effect", name)  # a client's text
    is_synchronous = texts.get("synchronous", "true").lower() == "true"
    new = NewModel(texts["url"], texts.get("model_name", ""), is_synchronous, texts)
    _check_name(service, new)
    slot = model_slot(service)
    if slot is None:
        raise ModelCapacityError(
            f"{new.url} cannot be loaded: this server serves one model per process, the one it was "
            "started with; start another server, or this one with load_models=NONE"
        )
    name = await slot.register(new)
    _show_workers(service, least, most)
    if is_synchronous:
        return json_answer({"status": f'Model "{name}" registered.'})
    return json_answer({"status": f'Model "{name}" registration scheduled.'}, 202)


def _check_name(service: InferenceService, new: NewModel) -> None:
    """Check that the model is not registered yet.

    Raises:
        ModelConflictError: it is, by its name, or without one by its URL.
    """
    lifecycle = service.lifecycle
    is_there = new.name == lifecycle.model_name or (not new.name and new.url == service.model_url)
    if lifecycle.has_model and is_there:
        raise ModelConflictError(f"Workflow {lifecycle.model_name} is already registered.")


def _scaled(request: web.Request, service: InferenceService) -> web.Response:
    """Answer as LMI does after scaling; the one engine is not changed."""
    given = dict(request.query)
    least, most = _number(given, "min_worker"), _number(given, "max_worker")
    if not service.lifecycle.takes_requests:
        raise NotReadyError(f"Model {service.lifecycle.model_name} is not ready to be scaled")
    _show_workers(service, least, most)
    model = managed_model(service).shown
    return json_answer(
        {
            "status": f'Workflow "{service.lifecycle.model_name}" worker scaled. New Worker '
            f"configuration min workers:{model.min_workers} max workers:{model.max_workers}"
        }
    )


def _show_workers(service: InferenceService, least: int | None, most: int | None) -> None:
    """Set the worker counts that the model's description shows; what is not given stays."""
    model = managed_model(service)
    most = model.shown.max_workers if most is None else most
    least = min(model.shown.min_workers, most) if least is None else least
    model.shown = replace(model.shown, min_workers=least, max_workers=max(most, least))


def _number(given: dict[str, str], name: str) -> int | None:
    """Return a whole number, None where it is not given.

    Raises:
        BadParameterError: it is not a whole number.
    """
    if name not in given:
        return None
    if not given[name].isdecimal() or len(given[name]) > 9:  # noqa: PLR2004 (fits an int)
        raise BadParameterError(f"Parameter {name}: expected a whole number (got {given[name]})")
    return int(given[name])


async def set_log_level(request: web.Request) -> web.Response:
    """Change how much is logged, vLLM's part included; no level is `info`."""
    name = request.query.get("level", "info").lower()
    if name not in LOG_LEVELS:
        raise BadParameterError(f"level: expected one of {', '.join(LOG_LEVELS)} (got {name})")
    for changed in (logging.getLogger(), logging.getLogger("vllm")):
        changed.setLevel(LOG_LEVELS[name])
    for tell in request.app[SERVICE].telemetry.on_level:
        tell(LOG_LEVELS[name])
    return json_answer({"status": "OK"})
