"""`log_request_metric`: when a line comes, and what it says."""

import logging

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.features.exporters.percentiles import RequestMetricLog, logging_request_metrics
from lmi_vllm.features.metrics import percentile
from tests.support.assembled import load_settings, model_context
from tests.unit.config.test_types import check_accepted
from tests.unit.conftest import Ended, ExplainRun


def test_every_so_many_requests_are_one_line(
    ended: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    """With p50 and p90 of what generated tokens; the rest does not count."""
    observe = RequestMetricLog(4)
    with caplog.at_level(logging.INFO):
        for tokens in (1, 2, 3):
            observe(ended(generated_tokens=tokens, token_seconds=tokens / 100, seconds=2.0))
        observe(ended(503))
        assert not caplog.records
        observe(ended(generated_tokens=10, seconds=2.0))
    assert [line.getMessage() for line in caplog.records] == [
        "4 requests: TokenLatency p50=20 p90=30 ms, TokenThroughput p50=1 p90=5 tokens/s, "
        "OutputTokens p50=2 p90=10 tokens"
    ]
    observe(ended(generated_tokens=1))
    assert len(caplog.records) == 1, "it begins again"


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 90, 7.0), ([2.0, 1.0], 50, 1.0), ([*map(float, range(1, 101))], 90, 90.0)],
    ids=["one", "two", "hundred"],
)
def test_percentiles_are_values_that_occurred(
    values: list[float], percent: int, expected: float
) -> None:
    """Nearest rank."""
    assert percentile(values, percent) == expected


@pytest.mark.parametrize("line", ["log_request_metric=true", "metrics_aggregation=10"])
def test_setting_is_accepted(line: str, explained: ExplainRun) -> None:
    """Known, without a warning."""
    check_accepted(line, explained)


async def test_lines_end_with_their_model() -> None:
    """A model's own serving.properties says whether, and after how many requests."""
    for text, every in (
        ("log_request_metric=true\nmetrics_aggregation=5", [5]),
        ("log_request_metric=true", [1000]),
        ("", []),
    ):
        file = parse_properties(text, "serving.properties")
        model = model_context(load_settings({}, extra_properties=file))
        observers = model.service.telemetry.observers
        async with logging_request_metrics(model):
            found = [one.every for one in observers if isinstance(one, RequestMetricLog)]
        assert found == every
        assert not any(isinstance(one, RequestMetricLog) for one in observers)
