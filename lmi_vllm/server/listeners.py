"""The open ports: one listener for all routes, or a second one for management."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from aiohttp import web

from lmi_vllm.clock import CONNECTION_CLOSE_SECONDS
from lmi_vllm.config.listen import (
    ListenAddress,
    MakeTls,
    RenewedKeys,
    api_keys,
    listen_plan,
    listener_tls,
)
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import StartupError
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.ports import open_port
from lmi_vllm.slot import Slot
from lmi_vllm.telemetry.log_handler import print_lines
from lmi_vllm.web.connection import ClientTimeouts
from lmi_vllm.web.request import PathPrefix, RouteGroup, Routes, WebOptions


@dataclass(frozen=True, slots=True)
class ListenerContext:
    """What the routes of a feature may depend on.

    `explain` returns what `lmi-vllm explain` shows, without secrets; it is called in a thread.
    `inference_url` is where requests are answered, if that is another listener.
    """

    settings: Settings
    environ: Mapping[str, str]
    explain: Callable[[], Mapping[str, object]]
    address: ListenAddress
    has_key: bool
    inference_url: str = ""


class RouteParts:
    """Routes of features: those of every listener, and those that depend on it (None: none).

    `prefix` makes a prefix in front of the paths of every listener.
    """

    def __init__(self) -> None:
        self.prefix = Slot[Callable[[Settings], PathPrefix | None]]("a prefix of paths")
        self.groups: list[RouteGroup] = []
        self.of_listener: list[Callable[[ListenerContext], RouteGroup | None]] = []


@dataclass(frozen=True, slots=True)
class Listeners:
    """The open listeners; `url` is where requests are answered."""

    url: str
    curl: str  # a command that sends a request
    runners: tuple[web.AppRunner, ...]
    address: ListenAddress
    pages: tuple[str, ...] = ()  # lines that name those for browsers

    async def stop(self) -> None:
        """Close every port; connections stay open."""
        for runner in self.runners:
            for site in tuple(runner.sites):
                await site.stop()

    async def close(self) -> None:
        """Close every port and connection."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(
                asyncio.gather(*(runner.cleanup() for runner in self.runners)),
                2 * CONNECTION_CLOSE_SECONDS,
            )


async def open_listeners(  # noqa: PLR0913, PLR0917 - one name for each thing that they need
    service: InferenceService,
    settings: Settings,
    environ: Mapping[str, str],
    parts: RouteParts,
    make_tls: MakeTls,
    explain: Callable[[], Mapping[str, object]],
    inner_socket: str = "",
) -> Listeners:
    """Open the configured listeners; from then on the application answers `/ping`.

    `explain` returns the configuration for pages of features. With `inner_socket` other processes
    may open the same port, and reach this one there.

    Raises:
        StartupError: an address is taken, a TLS file cannot be used, or a key file holds no key.
    """
    plan = listen_plan(settings.server)
    options = web_options(settings, parts)
    tls = listener_tls(settings, environ, make_tls)
    context = ListenerContext(settings, environ, explain, plan.inference, bool(options.api_keys))
    if plan.management is None:
        options = replace(options, groups=(*parts.groups, *_groups(context, parts)))
        runner, address = await open_port(plan.inference, service, options, tls, inner_socket)
        url = address.url()
        pages = tuple(_urls(url, options))
        print_lines(*pages, f"Listening on {url}")
        return Listeners(url, curl_line(url, has_key=context.has_key), (runner,), address, pages)
    inference = replace(options, routes=Routes.INFERENCE)
    runner, address = await open_port(plan.inference, service, inference, tls, inner_socket)
    url = address.url()
    context = replace(context, address=plan.management, inference_url=url)
    groups = (*parts.groups, *_groups(context, parts))
    is_open = settings.server.lmi_open_signals != "off"
    management = replace(options, routes=Routes.MANAGEMENT, groups=groups, has_open_signals=is_open)
    try:
        second, second_address = await open_port(plan.management, service, management, tls)
    except StartupError:
        await runner.cleanup()
        raise
    pages = (f"Management on {second_address.url()}", *_urls(second_address.url(), management))
    print_lines(*pages, f"Listening on {url}")
    curl = curl_line(url, has_key=context.has_key)
    return Listeners(url, curl, (runner, second), address, pages)


def _urls(url: str, options: WebOptions) -> list[str]:
    """Return the lines about groups of routes for browsers."""
    return [
        f"{group.title} on {reachable_url(url)}{group.prefix}"
        for group in options.groups
        if group.title
    ]


def _groups(context: ListenerContext, parts: RouteParts) -> tuple[RouteGroup, ...]:
    """Return the routes of features for one listener."""
    made = (make(context) for make in parts.of_listener)
    return tuple(group for group in made if group is not None)


def reachable_url(url: str) -> str:
    """Return a URL that works from this machine, also for an address of all interfaces."""
    # The event loop opens `::` for IPv6 alone.
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def curl_line(url: str, *, has_key: bool) -> str:
    """Return a command that sends a request to the server."""
    body = '{"inputs": "The capital of France is"}'
    reachable = reachable_url(url)
    if url.startswith("unix:"):
        reachable = f"--unix-socket {url.removeprefix('unix:')} http://localhost"
    key = ' -H "Authorization: Bearer $LMI_API_KEY"' if has_key else ""
    return f"curl -s {reachable}/invocations{key} -H 'Content-Type: application/json' -d '{body}'"


def web_options(settings: Settings, parts: RouteParts) -> WebOptions:
    """Return the arguments of the application of any listener."""
    server = settings.server
    cors = {
        f"Access-Control-Allow-{header}": value
        for header, value in (
            ("Origin", server.cors_allowed_origin),
            ("Methods", server.cors_allowed_methods),
            ("Headers", server.cors_allowed_headers),
        )
        if value
    }
    return WebOptions(
        max_request_size=server.max_request_size,
        request_id_header=server.request_id_header_key,
        api_keys=api_keys(server),
        renewed_keys=RenewedKeys(server) if server.lmi_api_key_file else None,
        has_open_signals=server.lmi_open_signals == "on",
        is_health_liveness=server.lmi_health_route == "liveness",
        allows_handler_override=server.allow_request_handler_override,
        prefix=parts.prefix.value(settings),
        groups=tuple(parts.groups),
        cors_headers=MappingProxyType(cors),
        default_accept=server.sagemaker_default_invocations_accept or "",
        timeouts=ClientTimeouts(
            server.lmi_header_timeout, server.lmi_body_timeout, server.lmi_send_timeout
        ),
    )
