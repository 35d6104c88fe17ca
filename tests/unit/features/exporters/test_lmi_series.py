"""LMI's own series: their names, their one label, their unit, and when they are there."""

import socket

import pytest
from prometheus_client import CollectorRegistry

from lmi_vllm.errors import Fault
from lmi_vllm.features.exporters.lmi_series import LmiSeries
from lmi_vllm.telemetry.records import DISCONNECTED
from tests.unit.conftest import Ended, ExplainRun

HOST = {"Host": socket.gethostname()}


def test_requests_are_counted_by_lmis_names(ended: Ended) -> None:
    """`Host` labels what the server counts, `Model` what the model took, in microseconds."""
    registry = CollectorRegistry()
    series = LmiSeries(lambda: "demo", registry)
    value = registry.get_sample_value
    assert value("Response_5XX_total", HOST) == 0
    for summary in (
        ended(200, 1.5, queue_seconds=0.25),
        ended(424),
        ended(503, fault=Fault.OVERLOAD),
        ended(500, fault=Fault.ENGINE),
        ended(DISCONNECTED),
        ended(200, is_inference=False),
    ):
        series(summary)
    counted = {
        name: value(f"{name}_total", HOST)
        for name in ("Response_2XX", "Response_4XX", "Response_5XX", "WlmError", "ServerError")
    }
    assert list(counted.values()) == [1, 1, 2, 1, 1]
    series(ended(200, 1.5, queue_seconds=0.25))
    assert value("RequestLatency", {"Model": "demo"}) == 1_500_000
    assert value("QueueTime", {"Model": "demo"}) == 250_000


def test_start_is_exported_under_lmis_names() -> None:
    """In microseconds as well."""
    registry = CollectorRegistry()
    LmiSeries(lambda: "demo", registry).set_start({"download": 2.0, "engine": 3.0, "warm-up": 1.0})
    assert registry.get_sample_value("DownloadModel", {"Model": "demo"}) == 2_000_000
    assert registry.get_sample_value("LoadModel", {"Model": "demo"}) == 3_000_000
    assert registry.get_sample_value("StartupLatency", HOST) == 6_000_000


@pytest.mark.parametrize(("text", "value"), [("true", True), ("", False)])
def test_lmis_switch_is_known(explained: ExplainRun, text: str, value: bool) -> None:
    """SERVING_PROMETHEUS, as in LMI."""
    run = explained("", {"SERVING_PROMETHEUS": text} if text else {})
    assert run.server["prometheus"] is value
    assert not any("PROMETHEUS" in warning for warning in run.warnings)
