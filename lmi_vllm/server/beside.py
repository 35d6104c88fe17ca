"""What runs beside a server: what extras do with it, and the engine's statistics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from lmi_vllm.clock import Clock
from lmi_vllm.config.settings import Settings
from lmi_vllm.extension import extras
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments


@dataclass(slots=True)
class ServerEvents:
    """What extras are told of the life of a server; `is_first` is false in a further process."""

    is_first: bool = True
    # Of each engine that is to be started, or joined by a further process.
    on_plan: list[Callable[[Settings, EngineArguments], None]] = field(default_factory=list)
    # Of each start of a model, with the seconds by phase.
    on_ready: list[Callable[[Mapping[str, float]], None]] = field(default_factory=list)
    # Awaited when the last request has been answered, while the engine still is there.
    on_drained: list[Callable[[], Awaitable[None]]] = field(default_factory=list)


BesideServer = Callable[
    [InferenceService, Settings, Mapping[str, str], ServerEvents], AbstractAsyncContextManager[None]
]


@contextlib.asynccontextmanager
async def running_extras(
    service: InferenceService, settings: Settings, environ: Mapping[str, str], events: ServerEvents
) -> AsyncIterator[None]:
    """Run what extras do beside a server, while the body runs."""
    async with contextlib.AsyncExitStack() as running:
        for extra in extras().values():
            if extra.beside_server is not None:
                run = extra.beside_server.load()
                await running.enter_async_context(run(service, settings, environ, events))
        yield


@contextlib.asynccontextmanager
async def engine_statistics(
    service: InferenceService, seconds: float, clock: Clock
) -> AsyncIterator[None]:
    """Have the engine log its statistics so often while the body runs; with 0 never."""
    logging_often = asyncio.create_task(_log_often(service, seconds, clock))
    try:
        yield
    finally:
        logging_often.cancel()


async def _log_often(service: InferenceService, seconds: float, clock: Clock) -> None:
    while seconds:
        await clock.sleep(seconds)
        if (engine := service.loaded_engine) is not None:
            await engine.log_statistics()
