"""The load of the engine, on whole answers to inference requests that ask for it."""

import pytest
from prometheus_client import CollectorRegistry, Gauge

from lmi_vllm.features.load_reports.reports import REQUEST_HEADER, RESPONSE_HEADER, report
from tests.conftest import ServeScripted

LMI = {"inputs": "x", "parameters": {"max_new_tokens": 1}}


@pytest.fixture
def registry() -> CollectorRegistry:
    """Some series as vLLM has them."""
    found = CollectorRegistry()
    Gauge("vllm:kv_cache_usage_perc", "", ("engine",), registry=found).labels("0").set(0.25)
    Gauge("vllm:num_requests_waiting", "", ("engine",), registry=found).labels("0").set(3)
    Gauge("vllm:num_requests_running", "", ("engine",), registry=found).labels("0").set(9)
    return found


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (
            "TEXT",
            "TEXT named_metrics.num_requests_waiting=3.0, named_metrics.kv_cache_usage_perc=0.25",
        ),
        (
            "json",
            'JSON {"named_metrics": {"num_requests_waiting": 3.0, "kv_cache_usage_perc": 0.25}}',
        ),
        ("BIN", None),
    ],
)
def test_report_is_written_as_vllm_writes_it(
    registry: CollectorRegistry, style: str, expected: str | None
) -> None:
    """`create_orca_header` of vLLM 0.32, for the two series that it names."""
    assert report(style, registry) == expected


@pytest.mark.parametrize(
    ("path", "body", "has_it"),
    [
        ("/invocations", LMI, True),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1}, True),
        ("/invocations", {**LMI, "stream": True}, False),
        ("/invocations", {"inputs": 5}, False),
    ],
)
async def test_header_is_on_whole_good_answers(
    serve: ServeScripted, path: str, body: object, has_it: bool
) -> None:
    """And on none that did not ask."""
    client = await serve()
    for headers, expected in (
        ({REQUEST_HEADER: "TEXT"}, has_it),
        ({REQUEST_HEADER: "BIN"}, False),
        ({}, False),
    ):
        response = await client.post(path, json=body, headers=headers)
        assert (RESPONSE_HEADER in response.headers) == expected, headers
    response = await client.get("/ping", headers={REQUEST_HEADER: "TEXT"})
    assert RESPONSE_HEADER not in response.headers
