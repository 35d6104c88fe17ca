"""Objects that live as long as a server: its service, `ServerContext`, features, processes."""

import asyncio
import contextlib
import functools
import json
import logging
import operator
from collections.abc import (
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    MutableMapping,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.adapters.hooks import AdapterHooks, Publish
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.clock import Clock
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.errors import Fault, StatusTable
from lmi_vllm.inference.context import ModelSteps
from lmi_vllm.inference.lifecycle import STARTING, Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, ServingProfile
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.server.start_parts import StartParts
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.configuration import Configuration

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 10


class ProcessGroup:
    """Further front-end processes over the engine of the first one; this base class has none."""

    first_socket = ""  # socket on which they reach the first process
    publish: Publish | None = None  # sends them what requests find

    def __init__(self) -> None:
        self.failed = asyncio.Event()  # more of them ended than can be replaced during one engine

    def opened(self, address: ListenAddress) -> None:
        """Set the address where all of them answer."""

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run; they import libraries while the engine starts."""

    def new_clients(self) -> tuple[EngineClient, ...]:
        """Return the clients of the engine that starts next, this process first."""
        return ()

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Let the processes join the engine; returns once all of them answer requests.

        Raises:
            EngineStartError: one of them could not.
        """

    async def confirm_state(self) -> None:
        """Return once every process follows the server's state: none admits by an older one."""

    def engine_died(self) -> None:
        """Let each of them end its requests: the engine has failed."""

    async def detach(self) -> None:
        """Let the processes leave the engine; they still answer, with the first process's state."""

    async def end(self) -> None:
        """Stop the processes."""

    def remove(self) -> None:
        """Remove their files and folders."""


MakeProcesses = Callable[[InferenceService, Settings, Mapping[str, str]], ProcessGroup | None]


# Watches a running engine; returns why it has to be replaced.
Watchdog = Callable[[Engine, Clock], Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A finished start: its plan, the seconds of its phases, where it is served, how to try it."""

    plan: StartPlan
    phase_seconds: Mapping[str, float]
    url: str
    curl: str


OnReady = Callable[[ReadyModel], None]


@dataclass(slots=True)
class ServerEvents:
    """Callbacks of features on the server's lifecycle; `is_first` is false in a further process."""

    is_first: bool = True
    on_ready: list[OnReady] = field(default_factory=list)


@dataclass(slots=True)
class ModelContext:
    """One model, from its plan to its end, and what parts of features add to it.

    A part is entered before the model's engine is started, or joined by a further process.
    """

    service: InferenceService
    settings: Settings
    arguments: EngineArguments
    environ: Mapping[str, str]
    sources: Sources
    is_first: bool = True
    publish: Publish | None = None  # sends further processes what requests find
    steps: ModelSteps = field(default_factory=ModelSteps)
    # Called with the model's adapters as their registry is made, and with the sources that find and
    # check their files. A further process has no sources.
    on_adapters: list[Callable[[AdapterRegistry, AdapterSources | None], AdapterHooks]] = field(
        default_factory=list
    )
    watchdogs: list[Watchdog] = field(default_factory=list)
    on_ready: list[OnReady] = field(default_factory=list)
    # Awaited after the last request has been answered, before the engine ends.
    on_drained: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    _parts: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def enter(self, parts: Iterable["ModelPart"]) -> None:
        """Let the parts begin, in their order.

        Raises:
            StartupError: the model's settings cannot be followed; those that began have ended.
        """
        async with contextlib.AsyncExitStack() as entered:
            for part in parts:
                await entered.enter_async_context(part(self))
            self._parts = entered.pop_all()

    async def leave(self) -> None:
        """Let the parts end, the last one first."""
        self.on_drained.clear()  # what was not called by now is about parts that are gone
        await self._parts.aclose()

    def adapter_hooks(
        self, registry: AdapterRegistry, sources: AdapterSources | None
    ) -> AdapterHooks:
        """What features do about the adapters of one model, and `publish`."""
        made = [make(registry, sources) for make in self.on_adapters]
        return functools.reduce(operator.or_, made, AdapterHooks(publish=self.publish))


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Parts that live as long as the server, whatever its model.

    `environ` are the variables that the server got. `exports` is where libraries and child
    processes read theirs: os.environ, except in tests.
    """

    configuration: Configuration
    start_parts: StartParts
    service: InferenceService
    environ: Mapping[str, str]
    exports: MutableMapping[str, str]
    engine_factory: EngineFactory
    processes: ProcessGroup
    clock: Clock
    events: ServerEvents


def new_service(settings: Settings, clock: Clock) -> InferenceService:
    """Return the service of a server that has not begun to start a model."""
    lifecycle = Lifecycle(now=clock.now)
    limit = settings.server.job_queue_size
    queue = RequestQueue(lifecycle, limit, clock=clock)
    return InferenceService(queue, statuses=error_statuses(settings))


def error_statuses(settings: Settings) -> StatusTable:
    """Return the status of every error, with the configured codes."""
    server = settings.server
    return StatusTable(
        {
            Fault.BAD_PARAMETER: server.bad_request_http_code,
            Fault.OVERLOAD: server.throttle_error_http_code,
            Fault.NOT_READY: server.wlm_error_http_code,
            Fault.ENGINE: server.server_error_http_code,
            Fault.DEADLINE: server.server_error_http_code,
        }
    )


# Belongs to one model, and lives as long as it.
ModelPart = Callable[[ModelContext], AbstractAsyncContextManager[None]]
ServerLifespan = Callable[
    [InferenceService, Settings, Mapping[str, str], ServerEvents], AbstractAsyncContextManager[None]
]


async def log_statistics(service: InferenceService, seconds: float, clock: Clock) -> None:
    """Let the engine log its statistics every `seconds`, until cancelled; 0 is off."""
    while seconds:
        await clock.sleep(seconds)
        if (engine := service.loaded_engine) is not None:
            await engine.log_statistics()


def _progress_text(body: Mapping[str, Any]) -> str:
    """Return the figures of `/ping` in words: `acme/m: phase engine, elapsed_seconds 10.0`."""
    parts = []
    for name, status in body.items():
        figures = [
            f"{key} {value if isinstance(value, str) else json.dumps(value)}"
            for key, value in status.items()
            if key != "status"
        ]
        parts.append(f"{name}: {', '.join(figures)}")
    return "; ".join(parts)


async def log_progress(lifecycle: Lifecycle, clock: Clock, limit_seconds: float) -> None:
    """Log the phase of a long start every few seconds; when it is late, name the time limits."""
    while True:
        await clock.sleep(HEARTBEAT_SECONDS)
        if lifecycle.state not in STARTING:
            continue
        _, body = lifecycle.ping()
        logger.info("starting: %s", _progress_text(body), extra={"fields": {"start": body}})
        if 0 < limit_seconds / 2 < lifecycle.start.engine_seconds:
            logger.warning(
                "half of model_loading_timeout (%g s) has passed; raise it, and on SageMaker the "
                "endpoint's container_startup_health_check_timeout with it",
                limit_seconds,
            )
