"""OpenTelemetry's own variables."""

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import ExtraSettings


class TraceSettings(ExtraSettings):
    """Where spans are sent, how, and under which name."""

    # fmt: off
    otel_exporter_otlp_endpoint: str | None = variable(parse.any_text, "Traces are sent there, to "
        "/v1/traces below it unless by grpc; it becomes the engine argument otlp_traces_endpoint.",
        values="URL")
    otel_exporter_otlp_traces_endpoint: str | None = variable(parse.any_text,
        "Traces are sent there exactly.", values="URL")
    otel_exporter_otlp_traces_protocol: str | None = variable(parse.one_of("grpc", "http/protobuf"),
        "How; unset: OTEL_EXPORTER_OTLP_PROTOCOL, else grpc to port 4317 and HTTP to others.",
        values="grpc, http/protobuf")
    otel_exporter_otlp_protocol: str | None = variable(parse.one_of("grpc", "http/protobuf"),
        "As OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.", values="grpc, http/protobuf")
    otel_service_name: str | None = variable(parse.any_text,
        "`service.name` of traces; unset: lmi_vllm.")
    # fmt: on
