"""CloudWatch EMF lines, held against AWS's specification of the format."""

import json
import re
from typing import Any

from lmi_vllm.errors import Fault
from lmi_vllm.features.exporters.emf import EmfWriter
from lmi_vllm.telemetry.records import DISCONNECTED
from tests.unit.conftest import Ended


def writer() -> tuple[EmfWriter, list[str]]:
    """Return a writer and what it has written."""
    lines: list[str] = []
    emf = EmfWriter(
        lines.append, "ns", lambda: "demo", lambda: {"RequestsInFlight": 2}, lambda: 1.5
    )
    return emf, lines


def parsed(line: str) -> dict[str, Any]:
    """Return a line's document, after the rules of the specification have been applied to it."""
    assert "\n" not in line
    document: dict[str, Any] = json.loads(line)
    metadata = document["_aws"]
    assert set(metadata) == {"Timestamp", "CloudWatchMetrics"}
    assert isinstance(metadata["Timestamp"], int)  # milliseconds
    for directive in metadata["CloudWatchMetrics"]:
        assert set(directive) == {"Namespace", "Dimensions", "Metrics"}
        assert 1 <= len(directive["Namespace"]) <= 1024
        for dimensions in directive["Dimensions"]:
            assert len(dimensions) <= 30
            assert all(isinstance(document[name], str) and document[name] for name in dimensions)
        assert len(directive["Metrics"]) <= 100
        for metric in directive["Metrics"]:
            assert set(metric) == {"Name", "Unit"}
            assert re.fullmatch(r"\w{1,1024}", metric["Name"])
            assert metric["Unit"] in ("Count", "Milliseconds")
            value = document[metric["Name"]]
            values = value if isinstance(value, list) else [value]
            assert 1 <= len(values) <= 100
            assert all(isinstance(one, int | float) for one in values)
    assert len(line.encode()) < 256 << 10  # CloudWatch's largest event
    return document


def test_a_line_sums_counts_and_keeps_every_latency(ended: Ended) -> None:
    """So that CloudWatch computes real percentiles."""
    emf, lines = writer()
    emf(ended(seconds=0.25, prompt_tokens=3, generated_tokens=5, first_token_seconds=0.125))
    emf(ended(424, 0.5, prompt_tokens=1))
    emf(ended(is_inference=False))
    emf.flush()
    document = parsed(lines[0])
    assert document["_aws"]["Timestamp"] == 1500
    assert (document["Model"], document["RequestsInFlight"]) == ("demo", 2)
    assert (document["Requests"], document["Response_2XX"], document["Response_4XX"]) == (2, 1, 1)
    assert (document["PromptTokens"], document["OutputTokens"]) == (4, 5)
    assert document["RequestLatency"] == [250.0, 500.0]
    assert document["TimeToFirstToken"] == [125.0]
    assert "QueueTime" not in document


def test_failures_are_counted_by_cause(ended: Ended) -> None:
    """Refused for lack of room, our own fault, and clients that disconnected."""
    emf, lines = writer()
    for request in (
        ended(503, fault=Fault.OVERLOAD),
        ended(500, fault=Fault.ENGINE),
        ended(200, fault=Fault.ENGINE),  # a stream that broke
        ended(DISCONNECTED),
    ):
        emf(request)
    emf.flush()
    document = parsed(lines[0])
    names = ("WlmError", "ServerError", "Disconnects", "Response_5XX", "Response_4XX")
    assert [document[name] for name in names] == [1, 2, 1, 2, 0]


def test_no_line_holds_more_values_than_the_format_allows(ended: Ended) -> None:
    """A full one is written at once; nothing is lost, nothing counted twice."""
    emf, lines = writer()
    for _ in range(250):
        emf(ended(queue_seconds=0.001))
    assert len(lines) == 2
    emf.flush()
    documents = [parsed(line) for line in lines]
    assert [document["Requests"] for document in documents] == [100, 100, 50]
    assert sum(len(document["QueueTime"]) for document in documents) == 250


def test_an_idle_interval_is_a_line_of_zeros() -> None:
    """An alarm can tell silence from health."""
    emf, lines = writer()
    emf.flush()
    assert parsed(lines[0])["Requests"] == 0


def test_a_start_is_a_line_of_its_own() -> None:
    """With upstream's names."""
    emf, lines = writer()
    emf.write_start({"settings": 0.5, "download": 2.0, "engine": 3.0})
    document = parsed(lines[0])
    assert document["StartupLatency"] == 5500.0
    assert (document["DownloadModel"], document["LoadModel"]) == (2000.0, 3000.0)
