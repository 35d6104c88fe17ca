"""Figures and table of a run whose outcomes are known."""

from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome
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
