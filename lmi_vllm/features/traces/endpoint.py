"""The endpoint of traces: OpenTelemetry's variables become the engine argument of vLLM.

Sources: the OpenTelemetry specification, "OpenTelemetry Protocol Exporter" (variables, `/v1/traces`
behind a general HTTP endpoint); vLLM's tracing/otel.py (which protocols it speaks).
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.messages import EngineArguments
from lmi_vllm.translate.draft import ArgumentDraft

ARGUMENT: Final = "otlp_traces_endpoint"
TRACES_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
GRPC_PORT: Final = 4317  # registered for OTLP over gRPC, as 4318 is for HTTP
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"


class TraceSettings(FeatureSettings):
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


def put_endpoint(draft: ArgumentDraft) -> None:
    """Put the endpoint among the engine arguments, unless an option sets it."""
    asked = draft.settings.feature(TraceSettings)
    protocol = asked.otel_exporter_otlp_traces_protocol or asked.otel_exporter_otlp_protocol or ""
    general = asked.details.otel_exporter_otlp_endpoint
    for setting in (asked.details.otel_exporter_otlp_traces_endpoint, general):
        if not setting.value or ARGUMENT in draft.values:
            continue
        url = str(setting.value)
        if not _is_web_url(url):
            expected = "expected a URL such as http://host:4318"
            draft.fail(f"{setting.name}: {expected} (got {mask_urls(url)})")
            continue
        if setting is general and chosen_protocol(url, protocol) == HTTP:
            url = url.rstrip("/") + "/v1/traces"
        draft.put(ARGUMENT, url, setting.origin)


def _is_web_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:  # half of an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def chosen_protocol(endpoint: str, asked: str) -> str:
    """Return the protocol: `asked`, else gRPC to port 4317 and HTTP to every other."""
    if asked:
        return asked
    try:
        port = urlsplit(endpoint).port
    except ValueError:
        port = None
    return GRPC if port == GRPC_PORT else HTTP


def plan_variables(arguments: EngineArguments, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables for the libraries where an endpoint is set; else none."""
    endpoint = arguments.values.get(ARGUMENT)
    return trace_variables(str(endpoint), environ) if endpoint else {}


def trace_variables(endpoint: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return protocol and service name for vLLM and the exporters; variables that are set win."""
    asked = environ.get(TRACES_PROTOCOL) or environ.get(PROTOCOL) or ""
    return {
        TRACES_PROTOCOL: chosen_protocol(endpoint, asked),
        SERVICE_NAME: environ.get(SERVICE_NAME) or "lmi_vllm",
    }
