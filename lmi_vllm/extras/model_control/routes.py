"""Registers, scales and unregisters the one model; the core's routes describe it."""

import logging
from dataclasses import replace
from typing import Final

from aiohttp import web

from lmi_vllm.errors import (
    BadParameterError,
    ModelCapacityError,
    ModelConflictError,
    NotReadyError,
    ResourceNotFoundError,
)
from lmi_vllm.extras.model_control.slot import ModelSlot, NewModel
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web import model_routes
from lmi_vllm.web.inference_routes import READ_METHODS, json_answer
from lmi_vllm.web.request import (
    OPTIONS,
    SERVICE,
    RouteGroup,
    Routes,
    check_method,
    given_arguments,
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
_EFFECTIVE: Final = ("url", "model_name", "job_queue_size", "synchronous", *_WORKERS)


def _add(app: web.Application) -> None:
    if app[OPTIONS].routes is Routes.INFERENCE:
        return
    app.router.add_route("*", "/models", models)
    app.router.add_route("*", "/models/{model}", one_model)


GROUP: Final = RouteGroup(_add)


async def models(request: web.Request) -> web.Response:
    """Register a model with POST; other methods are the core's, which lists models."""
    check_method(request, (*READ_METHODS, "POST"))
    if request.method != "POST":
        return await model_routes.models(request)
    return await _register(request, request.app[SERVICE])


async def one_model(request: web.Request) -> web.Response:
    """Scale (PUT) or unregister (DELETE) the model; reads are the core's."""
    if request.method in READ_METHODS:
        return await model_routes.one_model(request)
    service = request.app[SERVICE]
    name = request.match_info["model"]
    is_ours = model_routes.is_served(service, name)
    is_fixed = is_ours and service.model.is_loaded_at_startup
    check_method(request, (*READ_METHODS, "PUT", *(() if is_fixed else ("DELETE",))))
    if not is_ours:
        raise ResourceNotFoundError(
            f"Model or workflow not found: {name}", "ModelNotFoundException"
        )
    if request.method == "PUT":
        return _scaled(request, service)
    if not isinstance(service.models, ModelSlot):
        raise ModelCapacityError("the model this server was started with cannot be unregistered")
    await service.models.unregister()
    return json_answer({"status": f'Model or workflow "{name}" unregistered'})


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
    if not isinstance(service.models, ModelSlot):
        raise ModelCapacityError(
            f"{new.url} cannot be loaded: this server serves one model per process, the one it was "
            "started with; start another server, or this one with load_models=NONE"
        )
    name = await service.models.register(new)
    if least or most:
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
    is_there = new.name == lifecycle.model_name or (not new.name and new.url == service.model.url)
    if lifecycle.has_model and is_there:
        raise ModelConflictError(f"Workflow {lifecycle.model_name} is already registered.")


def _scaled(request: web.Request, service: InferenceService) -> web.Response:
    """Answer as LMI does after scaling; the one engine is not changed."""
    given = dict(request.query)
    least, most = _number(given, "min_worker"), _number(given, "max_worker")
    if service.lifecycle.state is not State.HEALTHY:
        raise NotReadyError(f"Model {service.lifecycle.model_name} is not ready to be scaled")
    _show_workers(service, least, most)
    model = service.model
    return json_answer(
        {
            "status": f'Workflow "{service.lifecycle.model_name}" worker scaled. New Worker '
            f"configuration min workers:{model.min_workers} max workers:{model.max_workers}"
        }
    )


def _show_workers(service: InferenceService, least: int | None, most: int | None) -> None:
    """Set the worker counts that the model's description shows; 1 where not given."""
    least = least or 1
    most = max(most or least, least)
    service.model = replace(service.model, min_workers=least, max_workers=most)


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
