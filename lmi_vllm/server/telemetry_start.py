"""What reads the server's telemetry: what extras export, request metrics, statistics, spans."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

from lmi_vllm.clock import Clock
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import StartupError
from lmi_vllm.extension import extras
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments
from lmi_vllm.telemetry.observers import RequestMetricLog
from lmi_vllm.translate import traces

if TYPE_CHECKING:
    from lmi_vllm.telemetry.otel import RequestTracer

LAST_SPANS_SECONDS: Final = 4.0
OTEL_MODULES: Final = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc",
)

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


class Traces:
    """Spans of requests, from the first ready model on: before, its engine still has to fork."""

    def __init__(self, service: InferenceService, environ: Mapping[str, str]) -> None:
        self._service = service
        self._environ = environ
        self._endpoint = ""
        self._tracer: RequestTracer | None = None

    def prepare(self, arguments: EngineArguments) -> None:
        """Remember where traces go; without an endpoint nothing is imported.

        Raises:
            StartupError: the libraries are missing.
        """
        self._endpoint = str(arguments.values.get(traces.ARGUMENT) or "")
        if self._endpoint and any(_is_missing(name) for name in OTEL_MODULES):
            raise StartupError(
                f"{traces.ARGUMENT} is set, but OpenTelemetry is not installed: "
                'pip install "lmi-vllm[otel]"'
            )

    def begin(self) -> None:
        """Trace requests from here on."""
        if not self._endpoint or self._tracer is not None:
            return
        from lmi_vllm.telemetry.otel import RequestTracer

        variables = traces.trace_variables(self._endpoint, self._environ)
        is_grpc = variables[traces.TRACES_PROTOCOL] == traces.GRPC
        name = variables[traces.SERVICE_NAME]
        self._tracer = RequestTracer(self._endpoint, name, is_grpc=is_grpc)
        self._service.telemetry.start_span = self._tracer.start_span

    async def close(self) -> None:
        """Send the last spans; an endpoint that does not answer is not waited for."""
        if self._tracer is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._tracer.close), LAST_SPANS_SECONDS)


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its parent is missing
        return True
