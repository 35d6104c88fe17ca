"""OpenTelemetry's variables to the engine argument: which wins, what is put behind, what is bad."""

import pytest

from lmi_vllm.features.traces.endpoint import chosen_protocol, trace_variables
from tests.unit.conftest import ExplainRun

MODEL = "option.model_id=acme/tiny\n"
BASE, EXACT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.mark.parametrize(
    ("environ", "properties", "endpoint"),
    [
        ("", "", None),
        (f"{BASE}=http://a:4318", "", "http://a:4318/v1/traces"),
        (f"{BASE}=http://a:4318/", "", "http://a:4318/v1/traces"),
        (f"{BASE}=http://a:4317", "", "http://a:4317"),
        (f"{BASE}=http://a:4318 {PROTOCOL}=grpc", "", "http://a:4318"),
        (f"{BASE}=http://a:4317 {PROTOCOL}=http/protobuf", "", "http://a:4317/v1/traces"),
        (f"{BASE}=http://a:4318 {EXACT}=https://b/x", "", "https://b/x"),
        (f"{BASE}=http://a:4318", "option.otlp_traces_endpoint=http://c/d\n", "http://c/d"),
    ],
    ids=["off", "http", "slash", "grpc port", "grpc asked", "http asked", "exact", "option"],
)
def test_the_endpoint_becomes_the_engine_argument(
    explained: ExplainRun, environ: str, properties: str, endpoint: str | None
) -> None:
    """As OpenTelemetry's specification reads the variables; an option of the user's wins."""
    done = explained(MODEL + properties, environ)
    assert done.errors == []
    assert done.engine_args.get("otlp_traces_endpoint") == endpoint


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (f"{BASE}=collector:4317", f"{BASE}: expected a URL such as http://host:4318"),
        (f"{BASE}=http://a {PROTOCOL}=http/json", "grpc, http/protobuf"),
    ],
    ids=["no URL", "JSON"],
)
def test_otlp_endpoint_unsupported_by_vllm_ends_the_start(
    explained: ExplainRun, environ: str, said: str
) -> None:
    """Named, with what is allowed."""
    done = explained(MODEL, environ)
    assert done.exit_code == 2
    assert any(said in error for error in done.errors), done.errors


def test_front_end_protocol_matches_vllm() -> None:
    """Its own default is another than ours, and it reads one variable only."""
    assert chosen_protocol("http://a:4318", "") == "http/protobuf"
    found = trace_variables("http://a:4317", {})
    assert found == {TRACES_PROTOCOL: "grpc", "OTEL_SERVICE_NAME": "lmi_vllm"}
    asked = {PROTOCOL: "http/protobuf", "OTEL_SERVICE_NAME": "mine"}
    found = trace_variables("http://a:4317", asked)
    assert found == {TRACES_PROTOCOL: "http/protobuf", "OTEL_SERVICE_NAME": "mine"}
