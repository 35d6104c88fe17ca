"""Models, adapters and metrics: HTTP to calls (http-api.md 10, adapters-api.md 4)."""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from lmi_vllm.errors import ResourceNotFoundError
from lmi_vllm.inference.admission import State
from lmi_vllm.web.keys import SERVICE

# What grows without end where something is not cleaned up; counted when asked for.
TASKS: Final = Gauge("lmi_asyncio_tasks", "Tasks of the event loop that have not ended.")
IN_FLIGHT: Final = Gauge("lmi_requests_in_flight", "Admitted requests, running and waiting.")
# As `/ping` shows them while a model is fetched; the last ones stay, 0 without any.
DOWNLOAD: Final[Mapping[str, Gauge]] = MappingProxyType(
    {
        "bytes": Gauge("lmi_download_bytes", "Bytes of the model that have arrived."),
        "bytes_total": Gauge("lmi_download_bytes_expected", "Bytes of the model to fetch."),
        "files": Gauge("lmi_download_files", "Files of the model that are complete."),
        "files_total": Gauge("lmi_download_files_expected", "Files of the model to fetch."),
    }
)


def add_management_routes(app: web.Application) -> None:
    """Register the routes, the adapters' under both prefixes."""
    app.router.add_get("/models", list_models)
    app.router.add_get("/models/{model}", describe_model)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/server/metrics", metrics)


async def metrics(request: web.Request) -> web.Response:
    """Answer with every series of the process, vLLM's among them, as Prometheus text."""
    TASKS.set(len(asyncio.all_tasks()))
    admission = request.app[SERVICE].admission
    IN_FLIGHT.set(admission.in_flight)
    for name, gauge in DOWNLOAD.items():
        gauge.set(float(str(admission.download.get(name, 0))))
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


def _json(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document) + b"\n", content_type="application/json")
