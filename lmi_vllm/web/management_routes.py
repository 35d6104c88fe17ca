"""Metrics and the log level: HTTP to calls (http-api.md 1)."""

import asyncio
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from lmi_vllm.errors import BadParameterError
from lmi_vllm.web.keys import SERVICE
from lmi_vllm.web.log_levels import LOG_LEVELS

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
    """Register the routes."""
    app.router.add_post("/server/logging", set_log_level)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/server/metrics", metrics)


async def set_log_level(request: web.Request) -> web.Response:
    """Change how much is logged, vLLM's part included; no level is `info`."""
    name = request.query.get("level", "info").lower()
    if name not in LOG_LEVELS:
        raise BadParameterError(f"level: expected one of {', '.join(LOG_LEVELS)} (got {name})")
    for logger in (logging.getLogger(), logging.getLogger("vllm")):
        logger.setLevel(LOG_LEVELS[name])
    return _json({"status": "OK"})


async def metrics(request: web.Request) -> web.Response:
    """Answer with every series of the process, vLLM's among them, as Prometheus text."""
    TASKS.set(len(asyncio.all_tasks()))
    admission = request.app[SERVICE].admission
    IN_FLIGHT.set(admission.in_flight)
    for name, gauge in DOWNLOAD.items():
        gauge.set(float(str(admission.download.get(name, 0))))
    return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _json(document: object) -> web.Response:
    return web.Response(body=orjson.dumps(document) + b"\n", content_type="application/json")
