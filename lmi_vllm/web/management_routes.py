"""Metrics, and `/`: a short page for people who open the printed URL."""

import asyncio
from collections.abc import Mapping
from html import escape
from types import MappingProxyType
from typing import Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from lmi_vllm._version import __version__
from lmi_vllm.errors import ResourceNotFoundError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.telemetry import metrics as ours
from lmi_vllm.web import sleep_route
from lmi_vllm.web.request import GROUPS, SERVICE

DOWNLOAD: Final[Mapping[str, Gauge]] = MappingProxyType(
    {
        "bytes": ours.DOWNLOAD_BYTES,
        "bytes_total": ours.DOWNLOAD_BYTES_EXPECTED,
        "files": ours.DOWNLOAD_FILES,
        "files_total": ours.DOWNLOAD_FILES_EXPECTED,
    }
)

# Links that need no feature.
_PAGES = {"/ping": "whether the model answers", "/metrics": "Prometheus"}
_HEADERS = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}


def add_management_routes(app: web.Application) -> None:
    """Register the routes."""
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/server/metrics", metrics)
    app.router.add_route("*", sleep_route.PATH, sleep_route.sleep)


async def metrics(request: web.Request) -> web.Response:
    """Answer with every series of the process, vLLM's included, as Prometheus text.

    `name[]` selects some of them, as in LMI.
    """
    service = request.app[SERVICE]
    _set_gauges(service)
    body = generate_latest(service.telemetry.series(request.query.getall("name[]", [])))
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _set_gauges(service: InferenceService) -> None:
    """Update the gauges that are computed at each scrape."""
    lifecycle, queue = service.lifecycle, service.queue
    ours.TASKS.set(len(asyncio.all_tasks()))
    is_asleep = lifecycle.state is State.ASLEEP
    ours.ASLEEP_SECONDS.set(lifecycle.rest_seconds if is_asleep else 0)
    ours.IN_FLIGHT.set(queue.in_flight)
    ours.QUEUE_LIMIT.set(queue.limit)
    for state in State:
        ours.STATE.labels(str(state)).set(state is lifecycle.shown_state)
    adapters = service.registered_adapters
    ours.ADAPTERS_REGISTERED.set(len(adapters))
    ours.ADAPTERS_LOADED.set(sum(adapter.ref is not None for adapter in adapters))
    for phase, seconds in lifecycle.start.phase_seconds.items():
        ours.STARTUP_SECONDS.labels(str(phase)).set(seconds)
    for step, seconds in lifecycle.start.step_seconds.items():
        ours.STARTUP_STEP_SECONDS.labels(step).set(seconds)
    for name, gauge in DOWNLOAD.items():  # as in `/ping`; the last figures stay
        number = lifecycle.start.download.get(name)
        gauge.set(number if isinstance(number, int | float) else 0)


def add_front_page(app: web.Application) -> None:
    """Register it; a feature may already have the path, and calls `front_page` itself."""
    app.router.add_route("*", "/", front_page)


async def front_page(request: web.Request) -> web.Response:
    """Answer with links, `OPTIONS` with nothing; other methods are not found.

    It has no more information than `/ping` gives to everyone.
    """
    if request.method == "OPTIONS":
        return web.Response(body=b"{}\n", content_type="application/json")
    if request.method not in ("GET", "HEAD"):
        raise ResourceNotFoundError
    lifecycle = request.app[SERVICE].lifecycle
    pages = {path: text for group in request.app[GROUPS] for path, text in group.pages.items()}
    there = {route.resource.canonical for route in request.app.router.routes() if route.resource}
    links = "".join(
        f'<li><a href=".{path}">{path}</a> {escape(text)}</li>'  # a proxy may have a prefix
        for path, text in (pages | _PAGES).items()
        if path in there
    )
    state = f"{lifecycle.model_name}: {lifecycle.state}" if lifecycle.has_model else "no model"
    head = f"<!doctype html><meta charset=utf-8><title>lmi_vllm</title><h1>lmi_vllm {__version__}"
    text = f"{head}</h1><p>{escape(state)}</p><ul>{links}</ul>\n"
    return web.Response(text=text, content_type="text/html", headers=_HEADERS)
