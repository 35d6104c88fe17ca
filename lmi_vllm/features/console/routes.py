"""The console: its page, which needs no key, and its data, which does.

The page has no routes of its own that change anything: adapters go through the public ones. It adds
`/console/state` and `/console/settings`, which only the page may read: no CORS header is sent,
cross-site requests are refused, and without a key so is every host name that could be rebound to
this machine (DNS rebinding).
"""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from lmi_vllm._version import __version__
from lmi_vllm.errors import CrossSiteError
from lmi_vllm.features.console.machine_memory import gpus_in_use, memory_in_use
from lmi_vllm.features.console.snapshot import read_snapshot, wanted_series
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.inference.start_words import steps_in_words
from lmi_vllm.server.listeners import ListenerContext
from lmi_vllm.translate.devices import detect_devices
from lmi_vllm.web.cross_site import is_cross_site
from lmi_vllm.web.request import OPTIONS, SERVICE, RouteGroup

CONSOLE_PATH: Final = "/console"
STATE_PATH: Final = CONSOLE_PATH + "/state"
SETTINGS_PATH: Final = CONSOLE_PATH + "/settings"
PAGE: Final = Path(__file__).parent / "page"
CONTENT_TYPES: Final = MappingProxyType(
    {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
)
SECURITY_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)
_MEMORY_SECONDS: Final = 1.5  # a reading is cached for so long


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """What the console shows and the web layer does not know.

    `explain` is called in a thread and returns no secret. `inference_url` is where requests are
    answered, when that is another listener. With `reads_gpus`, nvidia-smi is run.
    """

    explain: Callable[[], Mapping[str, object]]
    inference_url: str = ""
    reads_gpus: bool = False
    visible_gpus: str | None = None


def console(context: ListenerContext) -> RouteGroup | None:
    """Return the console of a listener, or None.

    With LMI_CONSOLE=auto it needs an API key, or a loopback address.
    """
    wanted = context.settings.server.lmi_console
    is_private = context.has_key or context.address.is_loopback
    if wanted != "on" and not (wanted == "auto" and is_private):
        return None
    environ = context.environ
    has_gpus = bool(detect_devices(environ).gpu_count)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return group(ConsoleOptions(context.explain, context.inference_url, has_gpus, visible))


def group(options: ConsoleOptions) -> RouteGroup:
    """Return the page, its files and its data as one group of routes."""
    return RouteGroup(
        partial(_add, options=options),
        prefix=CONSOLE_PATH,
        title="Console",
        pages=MappingProxyType({CONSOLE_PATH: "the console"}),
        is_open=is_open_page,
        check=check_console_request,
    )


def _add(app: web.Application, options: ConsoleOptions) -> None:
    for path in sorted(PAGE.iterdir()):
        if path.suffix in CONTENT_TYPES:
            name = CONSOLE_PATH if path.name == "index.html" else f"{CONSOLE_PATH}/{path.name}"
            app.router.add_get(
                name, _StaticFile(path.read_bytes(), CONTENT_TYPES[path.suffix]).answer
            )
    data = _ConsoleData(options)
    app.router.add_get(STATE_PATH, data.state)
    app.router.add_get(SETTINGS_PATH, data.settings)


def is_open_page(route: str) -> bool:
    """Whether a route is the page or one of its files, which hold no data of this server."""
    return route not in (STATE_PATH, SETTINGS_PATH)


def check_console_request(request: web.Request) -> None:
    """Check that the request comes from this server's own page.

    Raises:
        CrossSiteError: it comes from another site, or from a host name that may be rebound.
    """
    if is_cross_site(request) and not is_open_page(request.path):
        raise CrossSiteError("the console's data is for its own page only")
    if not request.app[OPTIONS].api_keys and not _is_rebinding_safe_host(
        request.headers.get("Host", "")
    ):
        raise CrossSiteError(
            "without an API key the console answers to addresses and localhost only, not to host "
            "names, which any DNS server may point here: use the address, or set LMI_API_KEY"
        )


class _StaticFile:
    """One file of the page."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self._body = body
        self._content_type = content_type

    async def answer(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._body,
            content_type=self._content_type,
            charset="utf-8",
            headers=SECURITY_HEADERS,
        )


class _ConsoleData:
    """The handlers of the page's data."""

    def __init__(self, options: ConsoleOptions) -> None:
        self._options = options
        self._memory: dict[str, object] = {}
        self._memory_time = 0.0
        self._memory_lock = asyncio.Lock()

    async def state(self, request: web.Request) -> web.Response:
        """Answer with the state of model, queue, engine and memory, as JSON."""
        service, web_options = request.app[SERVICE], request.app[OPTIONS]
        document = {
            "version": __version__,
            "time": time.monotonic(),
            **_model_state(service),
            **_load_state(service),
            "memory": await self._memory_now(),
            "has_key": bool(web_options.api_keys),
            "inference_url": self._options.inference_url,
        }
        return _json(document)

    async def settings(self, _: web.Request) -> web.Response:
        """Answer with the configuration, as `lmi-vllm explain --format json` prints it."""
        return _json(await asyncio.to_thread(self._options.explain))

    async def _memory_now(self) -> dict[str, object]:
        async with self._memory_lock:  # several open pages share one reading
            now = time.monotonic()
            if not self._memory or now - self._memory_time > _MEMORY_SECONDS:
                self._memory = await asyncio.to_thread(self._read_memory)
                self._memory_time = now
        return self._memory

    def _read_memory(self) -> dict[str, object]:
        options = self._options
        gpus = gpus_in_use(options.visible_gpus) if options.reads_gpus else []
        return {**memory_in_use(), "gpus": gpus}


def _model_state(service: InferenceService) -> dict[str, Any]:
    """Return the model's state, and the phases of its start in seconds."""
    lifecycle = service.lifecycle
    seconds = lifecycle.start.phase_seconds
    return {
        "model": lifecycle.model_name if lifecycle.has_model else "",
        "state": str(lifecycle.state),
        "phase": str(lifecycle.start.phase),
        "engine_steps": steps_in_words(lifecycle.start.step_seconds, lifecycle.start.figures),
        "elapsed_seconds": lifecycle.start.elapsed_seconds,
        "phases": [{"name": str(phase), "seconds": seconds.get(phase)} for phase in Phase],
        "download": dict(lifecycle.start.download),
        "task": service.profile.task,
        "tgi_compat": service.profile.tgi_compat,
        "served_names": list(service.profile.served_names),
    }


def _load_state(service: InferenceService) -> dict[str, Any]:
    """Return requests in flight, counters, KV cache and adapters."""
    snapshot = read_snapshot(service.telemetry.series(wanted_series()))
    adapters = service.registered_adapters
    return {
        "queue": {
            "in_flight": service.queue.in_flight,
            "limit": service.queue.limit,
            "running": snapshot.gauges.get("running"),
            "waiting": snapshot.gauges.get("waiting"),
        },
        "counters": snapshot.counters,
        "histograms": snapshot.histograms,
        "answers": snapshot.answers,
        "kv_cache": {
            "usage": snapshot.gauges.get("kv_usage"),
            "tokens": _int_or_none(snapshot.cache.get("kv_cache_size_tokens")),
            "bytes": _int_or_none(snapshot.cache.get("kv_cache_memory_bytes")),
        },
        "adapters": {
            "enabled": service.profile.enable_lora,
            "registered": len(adapters),
            "loaded": sum(adapter.ref is not None for adapter in adapters),
        },
    }


def _int_or_none(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _json(document: object) -> web.Response:
    body = orjson.dumps(document, default=str) + b"\n"
    return web.Response(body=body, content_type="application/json", headers=SECURITY_HEADERS)


def _is_rebinding_safe_host(host: str) -> bool:
    """Whether a Host header cannot be another site's name: an IP address, or localhost."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
