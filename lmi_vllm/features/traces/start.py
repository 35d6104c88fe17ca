"""Spans of requests, from the first ready model on: before, its engine still has to fork."""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

from lmi_vllm.errors import StartupError
from lmi_vllm.features.traces.endpoint import (
    ARGUMENT,
    GRPC,
    SERVICE_NAME,
    TRACES_PROTOCOL,
    trace_variables,
)
from lmi_vllm.server.context import ModelContext
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
async def tracing(model: ModelContext) -> AsyncIterator[None]:
    """Trace the requests to an engine that has an endpoint; the last spans are sent at a drain.

    Without an endpoint nothing is imported. A further process joins an engine that runs already.

    Raises:
        StartupError: the libraries are missing.
    """
    # The engine's arguments decide: an option may set what the variables do not.
    endpoint = str(model.arguments.values.get(ARGUMENT) or "")
    if not endpoint:
        yield
        return
    if any(_is_missing(name) for name in OTEL_MODULES):
        raise StartupError(
            f'{ARGUMENT} is set, but OpenTelemetry is not installed: pip install "lmi-vllm[otel]"'
        )
    traces = Traces(model.service.telemetry, endpoint, model.environ)
    if model.is_first:
        model.on_ready.append(lambda _: traces.begin())
    else:
        traces.begin()
    model.on_drained.append(traces.close)
    yield
    await traces.close()


class Traces:
    """Traces the requests of a model, from the moment when it is ready."""

    def __init__(self, hub: Telemetry, endpoint: str, environ: Mapping[str, str]) -> None:
        self._hub = hub
        self._endpoint = endpoint
        self._environ = environ
        self._tracer: RequestTracer | None = None

    def begin(self) -> None:
        """Start tracing requests."""
        variables = trace_variables(self._endpoint, self._environ)
        is_grpc = variables[TRACES_PROTOCOL] == GRPC
        from lmi_vllm.features.traces.spans import RequestTracer  # noqa: PLC0415

        self._tracer = RequestTracer(self._endpoint, variables[SERVICE_NAME], is_grpc=is_grpc)
        self._hub.start_span = self._tracer.start_span

    async def close(self) -> None:
        """Send the last spans; an endpoint that does not answer is not waited for."""
        tracer, self._tracer, self._hub.start_span = self._tracer, None, None
        if tracer is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(tracer.close), LAST_SPANS_SECONDS)


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its parent is missing
        return True
