"""Spans from HTTP to the engine arrive at a real OTLP endpoint, under the caller's own trace."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, StartServer, clean_environment

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
pytest.importorskip("opentelemetry.proto", reason="comes with vLLM")

from tests.support.otlp_collector import Collector, grpc_collector, http_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SERVER_KIND = 2
ASKED = {"model": "lmi", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
QUICK = {"OTEL_BSP_SCHEDULE_DELAY": "100"}


def traceparent(number: int, *, is_sampled: bool = True) -> tuple[str, dict[str, str]]:
    """Return a trace id of the test's, and the header that names it."""
    trace_id = f"{number:02x}{TRACE[2:]}"
    flags = "01" if is_sampled else "00"
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"}


@pytest.fixture(scope="module")
def http() -> Iterator[Collector]:
    """A collector over HTTP."""
    with http_collector() as collector:
        yield collector


def check_lanes(server: RunningServer, collector: Collector) -> None:
    """Each lane's request is our span below the caller's, and the engine's below ours."""
    lanes = (
        ("/invocations", {"inputs": "x", "parameters": {"max_new_tokens": 3}}),
        ("/invocations", {"inputs": "x", "parameters": {"max_new_tokens": 3}, "stream": True}),
        ("/v1/completions", {"model": "capitals", "prompt": "x", "max_tokens": 3}),
        ("/v1/chat/completions", {"model": "lmi", "max_tokens": 3, "stream": True,
                                  "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", ASKED),
        ("/v1/messages", {**ASKED, "stream": True}),
        ("/v1/responses", {"model": "lmi", "max_output_tokens": 3, "input": "x"}),
        ("/v1/chat/completions/batch", {**ASKED, "messages": [ASKED["messages"]]}),
    )  # fmt: skip
    for number, (path, body) in enumerate(lanes):
        trace_id, headers = traceparent(number + 1)
        assert call(server.url, path, body, headers=headers).status == 200
        assert wait_until(lambda trace=trace_id: len(collector.of(trace)) == 2, 20), path
        spans = {span.name: span for span in collector.of(trace_id)}
        ours, engine = spans[f"POST {path}"], spans["llm_request"]
        assert (ours.parent_id, ours.kind) == (PARENT, SERVER_KIND)
        assert engine.parent_id == ours.span_id
        assert ours.service == engine.service == "lmi_vllm"
        assert ours.attributes["http.response.status_code"] == 200
        assert ours.attributes["http.route"] == path
        assert ours.attributes["gen_ai.usage.output_tokens"] == 3
        assert engine.attributes["gen_ai.usage.completion_tokens"] == 3
        wanted = "capitals" if path == "/v1/completions" else None
        assert ours.attributes.get("lmi.adapter") == wanted


@pytest.mark.parametrize("make", [http_collector, grpc_collector], ids=["http", "grpc"])
def test_the_engines_span_is_below_ours(
    server_process: StartServer, make: Callable[[], AbstractContextManager[Collector]]
) -> None:
    """Over both protocols, on every lane, in the trace of the caller; the last span is not lost."""
    with make() as collector:
        protocol = "grpc" if make is grpc_collector else "http/protobuf"
        environ = QUICK | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        }
        process = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
        server = RunningServer(process, process.wait_listening())
        process.wait_ready()
        check_lanes(server, collector)
        unsampled, headers = traceparent(0x20, is_sampled=False)
        call(server.url, "/invocations", {"inputs": "x"}, headers=headers)
        call(server.url, "/ping", headers=traceparent(0x21)[1])
        bad, headers = traceparent(0x22)
        call(server.url, "/invocations", {"inputs": 1}, headers=headers)
        process.process.terminate()
        assert process.wait_exit() == 0
        (span,) = collector.of(bad)
        assert span.attributes["http.response.status_code"] == 424
        assert span.status == 0, "a client's mistake is no error of the server's"
        assert not collector.of(unsampled)
        assert not collector.of(traceparent(0x21)[0])
        if protocol != "grpc":
            assert collector.paths == {"/v1/traces"}


def test_without_a_traceparent_a_trace_begins_here(
    server_process: StartServer, http: Collector
) -> None:
    """And what is no traceparent is ignored; an endpoint with a path is used as it is."""
    environ = QUICK | {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{http.url}/my/traces",
        "OTEL_SERVICE_NAME": "mine",
    }
    process = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = process.url_when_ready(20)
    for headers in ({}, {"traceparent": "rubbish"}):
        assert call(url, "/invocations", {"inputs": "x"}, headers=headers).status == 200
    assert wait_until(lambda: len(http.spans) == 2, 20)
    first, second = http.spans
    assert (first.parent_id, second.parent_id) == ("", "")
    assert first.trace_id != second.trace_id
    assert http.paths == {"/my/traces"}
    assert first.service == "mine"


def test_unreachable_collector_does_not_slow_requests(server_process: StartServer) -> None:
    """Requests are answered, and the server ends in time."""
    environ = QUICK | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    process = server_process("--demo", "--port", "0", "--engine", "scripted", environ=environ)
    url = process.url_when_ready(20)
    assert call(url, "/invocations", {"inputs": "x"}).status == 200
    process.process.terminate()
    assert process.wait_exit(20) == 0


def test_off_means_not_imported() -> None:
    """What serves without an endpoint knows no OpenTelemetry."""
    code = (
        "import sys, lmi_vllm.commands.serve, lmi_vllm.server.server\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    environ = clean_environment() | {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0
