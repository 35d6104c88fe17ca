"""The one model: list and describe it."""

from typing import Any, Final

from aiohttp import web

from lmi_vllm.errors import ResourceNotFoundError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.inference_routes import READ_METHODS, json_answer
from lmi_vllm.web.request import SERVICE, check_method, page_of

_MOST_WORKERS: Final = 256  # listed one by one; the counts beside them are as asked
_SHOWN_STATES: Final = {State.HEALTHY: "READY", State.FAILED: "FAILED"}


def add_model_routes(app: web.Application) -> None:
    """Register the routes, after those of adapters, whose paths are longer."""
    app.router.add_route("*", "/models", models)
    app.router.add_route("*", "/models/{model}", one_model)
    app.router.add_route("*", "/models/{model}/{version}", one_model)


async def models(request: web.Request) -> web.Response:
    """List the model."""
    service = request.app[SERVICE]
    check_method(request, READ_METHODS)
    lifecycle = service.lifecycle
    found: list[dict[str, str]] = []
    if lifecycle.has_model:
        status = _SHOWN_STATES.get(lifecycle.state, "PENDING")
        found.append(
            {"modelName": lifecycle.model_name, "modelUrl": service.model.url, "status": status}
        )
    items, token = page_of(found, request.query)
    page: dict[str, Any] = {"models": items}
    return json_answer(page if token is None else {**page, "nextPageToken": token})


async def one_model(request: web.Request) -> web.Response:
    """Describe the model."""
    service, name = request.app[SERVICE], request.match_info["model"]
    check_method(request, READ_METHODS)
    if not is_served(service, name):
        raise ResourceNotFoundError(f"Workflow not found: {name}", "ModelNotFoundException")
    return json_answer([{"workflowName": name, "models": [_description(service)]}])


def is_served(service: InferenceService, name: str) -> bool:
    """Whether that is the name of the model, if there is one."""
    return service.lifecycle.has_model and name == service.lifecycle.model_name


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
