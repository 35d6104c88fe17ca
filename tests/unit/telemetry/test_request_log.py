"""Which requests have a line in the log."""

import logging

import pytest

from lmi_vllm.telemetry.observers import RequestLog
from lmi_vllm.telemetry.records import Dialect, RequestSummary


def summary(route: str, status: int) -> RequestSummary:
    """Return a request that has ended."""
    return RequestSummary("id", "GET", route, route, "-", status, Dialect.SERVER, "", 0.001)


def test_first_probe_of_a_start_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A replica of Ray asks five times a second, and a large model loads for minutes."""
    log = RequestLog()
    asked = [("/ready", 503)] * 3 + [("/ping", 503), ("/ready", 401), ("/ready", 401)]
    asked += [("/ready", 200), ("/ready", 503), ("/ready", 503), *[("/invocations", 503)] * 2]
    with caplog.at_level(logging.INFO, "lmi_vllm.requests"):
        for route, status in asked:
            log(summary(route, status))
    lines = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(line["route"], line["status"]) for line in lines] == [
        ("/ready", 503), ("/ping", 503), ("/ready", 401), ("/ready", 401), ("/ready", 503),
        ("/invocations", 503), ("/invocations", 503),
    ]  # fmt: skip
