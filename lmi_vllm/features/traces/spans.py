"""Spans of requests through OpenTelemetry; imported only where an endpoint is set.

The provider is ours and not the global one, which is vLLM's: both send to the same endpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lmi_vllm._version import __version__
from lmi_vllm.errors import Fault
from lmi_vllm.telemetry.records import RequestRecord, RequestSummary

FLUSH_MILLISECONDS: Final = 2000
_FIRST_SERVER_ERROR: Final = 500
_OUR_FAULTS: Final = frozenset({Fault.ENGINE, Fault.DEADLINE, Fault.MEMORY})
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """The server's span of one request."""

    span: trace.Span
    headers: Mapping[str, str]

    def end(self, summary: RequestSummary) -> None:
        """Set the outcome by OpenTelemetry's semantic conventions, and end the span."""
        self.span.update_name(f"{summary.method} {summary.route}")
        found: dict[str, str | int | None] = {
            "http.route": summary.route,  # that of the engine's application is found later
            "http.response.status_code": summary.status,
            "gen_ai.usage.input_tokens": summary.prompt_tokens or None,
            "gen_ai.usage.output_tokens": summary.generated_tokens or None,
            "lmi.dialect": summary.dialect,
            "lmi.adapter": summary.adapter or None,
        }
        is_error = summary.status >= _FIRST_SERVER_ERROR or summary.fault in _OUR_FAULTS
        if is_error:
            found["error.type"] = str(summary.fault or summary.status)
            self.span.set_status(trace.StatusCode.ERROR)
        self.span.set_attributes(
            {name: value for name, value in found.items() if value is not None}
        )
        self.span.end()


class RequestTracer:
    """Starts a span for each request, a child of the caller's where it sent a `traceparent`."""

    def __init__(self, endpoint: str, service_name: str, *, is_grpc: bool) -> None:
        exporter: SpanExporter = (
            GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http:"))
            if is_grpc
            else HttpExporter(endpoint=endpoint)
        )
        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lmi_vllm", __version__)

    def start_span(self, record: RequestRecord, headers: Mapping[str, str]) -> RequestSpan:
        """Return the span of a request, with the headers that make the engine's span its child."""
        span = self._tracer.start_span(
            f"{record.method} {record.route}",
            context=_PROPAGATOR.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": record.method,
                "http.route": record.route,
                "url.path": record.shown_path.partition("?")[0],
                "client.address": record.remote,
                "lmi.request_id": record.request_id,
            },
        )
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        return RequestSpan(span, MappingProxyType(carrier))

    def close(self) -> None:
        """Flush the spans that are left, vLLM's too; each provider has 2 s."""
        for provider in (self._provider, trace.get_tracer_provider()):
            if isinstance(provider, TracerProvider):
                provider.force_flush(FLUSH_MILLISECONDS)
