"""Spans of requests, from the first ready model on: before, its engine still has to fork."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import StartupError
from lmi_vllm.features.traces.endpoint import (
    ARGUMENT,
    GRPC,
    SERVICE_NAME,
    TRACES_PROTOCOL,
    trace_variables,
)
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.observers import Telemetry

if TYPE_CHECKING:
    from lmi_vllm.features.traces.spans import RequestTracer

LAST_SPANS_SECONDS: Final = 4.0
OTEL_MODULES: Final = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry.exporter.otlp.proto.grpc",
)


@contextlib.asynccontextmanager
async def tracing(
    service: InferenceService, _: Settings, environ: Mapping[str, str], events: ServerEvents
) -> AsyncIterator[None]:
    """Trace the requests to engines that have an endpoint; the last spans are sent at a drain."""
    traces = Traces(service.telemetry, environ)
    # The engine's arguments decide: an option may set what the variables do not.
    events.on_plan.append(lambda _, arguments: traces.prepare(arguments))
    events.on_ready.append(lambda _: traces.begin())
    events.on_drained.append(traces.close)
    yield


class Traces:
    """Starts tracing when a model is ready, and stops with the server."""

    def __init__(self, hub: Telemetry, environ: Mapping[str, str]) -> None:
        self._hub = hub
        self._environ = environ
        self._endpoint = ""
        self._tracer: RequestTracer | None = None

    def prepare(self, arguments: EngineArguments) -> None:
        """Remember where traces go; without an endpoint nothing is imported.

        Raises:
            StartupError: the libraries are missing.
        """
        self._endpoint = str(arguments.values.get(ARGUMENT) or "")
        if self._endpoint and any(_is_missing(name) for name in OTEL_MODULES):
            raise StartupError(
                f"{ARGUMENT} is set, but OpenTelemetry is not installed: "
                'pip install "lmi-vllm[otel]"'
            )
        if self._hub.send_line is not None:  # a further process joins an engine that runs
            self.begin()

    def begin(self) -> None:
        """Start tracing requests, where an endpoint is set."""
        if not self._endpoint or self._tracer is not None:
            return
        variables = trace_variables(self._endpoint, self._environ)
        is_grpc = variables[TRACES_PROTOCOL] == GRPC
        from lmi_vllm.features.traces.spans import RequestTracer  # noqa: PLC0415

        self._tracer = RequestTracer(self._endpoint, variables[SERVICE_NAME], is_grpc=is_grpc)
        self._hub.start_span = self._tracer.start_span

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
