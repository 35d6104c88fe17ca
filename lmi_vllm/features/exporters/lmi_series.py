"""LMI's own metric series, for dashboards that query them by name and label.

As in LMI they are exported with SERVING_PROMETHEUS=true and have one label: `Host` for series of
the server, `Model` for those of the model. Times are in microseconds, of the last request.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import ENV, option, ours
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.errors import Fault
from lmi_vllm.telemetry.records import RequestSummary

_WORKLOAD_FAULTS: Final = frozenset({Fault.OVERLOAD, Fault.NOT_READY})
_FIRST_SERVER_ERROR: Final = 500
_RESPONSES: Final = ("Response_2XX", "Response_4XX", "Response_5XX")
_HOST_SERIES: Final = (*_RESPONSES, "WlmError", "ServerError")
_MODEL_SERIES: Final = ("RequestLatency", "QueueTime", "LoadModel", "DownloadModel")


class LmiSeriesSettings(FeatureSettings):
    """LMI's switch for its metrics."""

    section: ClassVar[str] = "Server"

    # fmt: off
    prometheus: bool = option(parse.boolean, ours(), default=False, written=(ENV,), values="bool",
        note="Also have LMI's own series among the metrics (Response_2XX, RequestLatency, ...); "
        "ours are there always.")
    # fmt: on


def counted_as(summary: RequestSummary) -> Iterator[str]:
    """Yield the names of LMI's counters that an inference request increments."""
    response = f"Response_{summary.status // 100}XX"
    if not summary.is_disconnected and response in _RESPONSES:
        yield response
    if summary.fault in _WORKLOAD_FAULTS:
        yield "WlmError"
    elif summary.status >= _FIRST_SERVER_ERROR or summary.fault is Fault.ENGINE:
        yield "ServerError"


class LmiSeries:
    """Counts inference requests in LMI's series; `model` returns the model's name."""

    def __init__(self, model: Callable[[], str], registry: CollectorRegistry = REGISTRY) -> None:
        gauge = partial(Gauge, registry=registry, multiprocess_mode="mostrecent")
        self._model = model
        self._host = socket.gethostname()
        self._counters = {
            name: Counter(name, f"LMI's {name}.", ("Host",), registry=registry)
            for name in _HOST_SERIES
        }
        self._times = {
            name: gauge(name, f"LMI's {name}, in microseconds.", ("Model",))
            for name in _MODEL_SERIES
        }
        self._startup = gauge("StartupLatency", "LMI's StartupLatency.", ("Host",))
        for counter in self._counters.values():
            counter.labels(self._host)  # exported as 0 before the first request

    def __call__(self, summary: RequestSummary) -> None:
        """Count one request; routes other than inference are not counted."""
        if not summary.is_inference:
            return
        for name in counted_as(summary):
            self._counters[name].labels(self._host).inc()
        self._set("RequestLatency", summary.seconds)
        if summary.queue_seconds is not None:
            self._set("QueueTime", summary.queue_seconds)

    def set_start(self, phase_seconds: Mapping[str, float]) -> None:
        """Set the durations of a start; `phase_seconds` are in seconds by phase."""
        self._set("LoadModel", phase_seconds.get("engine", 0.0))
        self._set("DownloadModel", phase_seconds.get("download", 0.0))
        self._startup.labels(self._host).set(sum(phase_seconds.values()) * 1e6)

    def _set(self, name: str, seconds: float) -> None:
        self._times[name].labels(self._model()).set(seconds * 1e6)
