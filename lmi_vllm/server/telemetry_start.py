"""What reads the server's telemetry: what extras export, request metrics, statistics."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager

from lmi_vllm.clock import Clock
from lmi_vllm.config.settings import Settings
from lmi_vllm.extension import extras
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.telemetry.observers import RequestMetricLog

RunTelemetry = Callable[
    [InferenceService, Settings, Mapping[str, str]], AbstractAsyncContextManager[None]
]


@contextlib.asynccontextmanager
async def running_telemetry(
    service: InferenceService, settings: Settings, environ: Mapping[str, str]
) -> AsyncIterator[None]:
    """Run what extras do with the server's telemetry, while the body runs."""
    async with contextlib.AsyncExitStack() as running:
        for extra in extras().values():
            if extra.telemetry is not None:
                run = extra.telemetry.load()
                await running.enter_async_context(run(service, settings, environ))
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


def log_request_metrics(service: InferenceService, settings: Settings) -> None:
    """Begin to write `log_request_metric`'s lines, where the model's settings ask for them."""
    observers = service.telemetry.observers
    observers[:] = [one for one in observers if not isinstance(one, RequestMetricLog)]
    if settings.server.log_request_metric:
        every = settings.server.metrics_aggregation
        observers.append(RequestMetricLog(every))
