"""Figures, table, plots and live view of a run whose outcomes are known."""

import io
import xml.etree.ElementTree as ET

from lmi_vllm.features.bench.live import LiveView, sparkline
from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome
from lmi_vllm.features.bench.plots import plots
from lmi_vllm.features.bench.report import BenchReport
from lmi_vllm.features.bench.run import LoadRun


class NoClient:
    """A client that is never asked."""

    async def send(self, request: LoadRequest, outcome: RequestOutcome, now: object) -> None:
        """Fail."""
        raise AssertionError


def outcome(began: float, tokens: int, adapter: str | None = None) -> RequestOutcome:
    """Return a good answer: the first token after 100 ms, then one each 10 ms."""
    made = RequestOutcome(began, adapter=adapter)
    for number in range(tokens):
        made.add_tokens(1, began + 0.1 + number * 0.01)
    made.ended = began + 0.1 + tokens * 0.01
    return made


def report(*outcomes: RequestOutcome, seconds: float = 2.0) -> BenchReport:
    """Return the report of a run with these."""
    run = LoadRun(LoadPlan(), NoClient(), list(outcomes))
    run.seconds = seconds
    return BenchReport(run, "http://h: lmi <streamed>")


def failed(kind: str, example: str) -> RequestOutcome:
    """Return a request without an answer."""
    made = RequestOutcome(0.0, ended=1.0)
    made.fail(kind, example)
    return made


def test_throughput_and_latencies_are_those_of_whole_answers() -> None:
    """A failed request adds nothing but itself."""
    bad = failed("HTTP 503", "queue full")
    bad.output_tokens = 1000
    document = report(outcome(0, 11), outcome(0.5, 11), bad).document()
    assert (document["requests"], document["good"], document["failed"]) == (3, 2, 1)
    assert (document["output_tokens"], document["output_tokens_per_second"]) == (22, 11.0)
    assert document["requests_per_second"] == 1.0
    latency = document["latency_milliseconds"]
    assert latency["time_to_first_token"]["p50"] == 100.0
    assert latency["inter_token_latency"]["p99"] == 10.0
    assert latency["time_per_output_token"]["mean"] == 10.0
    assert latency["end_to_end"]["max"] == 210.0


def test_errors_are_counted_by_kind_with_an_example() -> None:
    """The most frequent first; in the table too."""
    made = report(failed("timeout", "a"), failed("HTTP 503", "b"), failed("HTTP 503", "c"))
    assert made.document()["errors"] == {
        "HTTP 503": {"count": 2, "example": "b"},
        "timeout": {"count": 1, "example": "a"},
    }
    assert made.lines()[-3:] == ["errors", "      2  HTTP 503: b", "      1  timeout: a"]


def test_figures_are_by_adapter_where_there_are_several() -> None:
    """Requests without one are `base`; without adapters there is no such table."""
    assert report(outcome(0, 2)).document()["adapters"] == {}
    found = report(outcome(0, 2), outcome(0, 2, "a"), outcome(0, 2, "a")).document()["adapters"]
    assert {name: row["requests"] for name, row in found.items()} == {"a": 2, "base": 1}


def test_plots_are_a_document_whatever_happened() -> None:
    """Four panels, the subject as text; also of a run without one answer."""
    for made in (report(outcome(0, 5), outcome(1, 50)), report(), report(failed("x", ""))):
        root = ET.fromstring(plots(made))
        assert root.tag.endswith("svg")
        texts = [element.text for element in root.iter() if element.tag.endswith("text")]
        assert "http://h: lmi <streamed>" in texts
        assert len([one for one in root if one.tag.endswith("}g")]) == 4
        assert "nan" not in plots(made)


def test_the_live_view_says_where_a_run_is() -> None:
    """Done, in flight, failed, and the latest times."""
    made = report(outcome(0, 11), failed("timeout", ""))
    made.run.in_flight = 3
    shown = " ".join(LiveView(made.run, io.StringIO()).lines())
    assert "2/100 done, 3 in flight, 1 failed" in shown
    assert "first token p50 100 ms, end to end p50 210 ms" in shown
    assert sparkline([0.0, 5.0, 10.0]) == "▁▄█"
