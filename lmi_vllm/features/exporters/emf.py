"""CloudWatch's embedded metric format: lines of JSON that become metrics without any agent.

The specification: AWS, "Embedded metric format specification" (Amazon CloudWatch user guide): at
most 100 metrics in a directive and 100 values of one metric in a line.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import orjson

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.features.exporters.lmi_series import counted_as
from lmi_vllm.features.metrics import DROPPED_METRIC_LINES
from lmi_vllm.telemetry.log_handler import MAX_QUEUED_BYTES, QueuedHandler
from lmi_vllm.telemetry.records import RequestSummary

logger = logging.getLogger(__name__)

MAX_VALUES: Final = 100
COUNT: Final = "Count"
MILLISECONDS: Final = "Milliseconds"

# Metrics that are summed up over the interval (config/operations.md lists upstream's names).
COUNTERS: Final = (
    "Requests", "Response_2XX", "Response_4XX", "Response_5XX", "WlmError", "ServerError",
    "Disconnects", "PromptTokens", "OutputTokens",
)  # fmt: skip


class EmfSettings(FeatureSettings):
    """CloudWatch's lines on stdout."""

    # fmt: off
    lmi_metrics_emf: bool = variable(parse.boolean, "Write CloudWatch EMF lines on stdout.",
        default=False, values="bool")
    lmi_metrics_emf_interval: float = variable(parse.seconds, "Time between two of them.",
        default=60, values="seconds")
    lmi_metrics_emf_namespace: str = variable(parse.any_text,
        "CloudWatch namespace of their metrics.", default="lmi_vllm")
    # fmt: on


class MetricLines(QueuedHandler):
    """Writes lines of metrics as they are; what is dropped is counted, and named in the log.

    Containers hand stdout to CloudWatch by an agent, which may stall like one that reads the log.
    """

    def __init__(self, descriptor: int, name: str, most_bytes: int = MAX_QUEUED_BYTES) -> None:
        super().__init__(descriptor, DROPPED_METRIC_LINES.inc, most_bytes)
        self._name = name

    def write(self, line: str) -> None:
        """Queue one line, or drop it where too many wait."""
        self.queue(line.encode("utf-8", "backslashreplace") + b"\n")

    def notice(self, dropped: int) -> bytes:
        """Name them in the log and return nothing: such lines are for machines."""
        logger.warning(
            "%s: %d lines were dropped: what takes them had stopped", self._name, dropped
        )
        return b""


@dataclass(slots=True)
class EmfWriter:
    """Aggregates inference requests and writes one line per interval, or when a line is full.

    `gauges` returns the present counts by name. The only dimension is the model: CloudWatch bills
    each value of a dimension, so clients must not be able to choose one.
    """

    write: Callable[[str], None]
    namespace: str
    model: Callable[[], str]
    gauges: Callable[[], Mapping[str, float]] = dict
    now: Callable[[], float] = time.time
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    _values: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, summary: RequestSummary) -> None:
        """Add one request to the line; routes other than inference are not counted."""
        if not summary.is_inference:
            return
        self._count(summary)
        for name, seconds in (
            ("RequestLatency", summary.seconds),
            ("TimeToFirstToken", summary.first_token_seconds),
            ("TokenLatency", summary.token_seconds),
            ("QueueTime", summary.queue_seconds),
        ):
            if seconds is not None:
                self._values.setdefault(name, []).append(round(seconds * 1000, 3))
        if len(self._values["RequestLatency"]) >= MAX_VALUES:
            self.flush()

    def _count(self, summary: RequestSummary) -> None:
        counts = self._counts
        counts["Requests"] += 1
        counts["PromptTokens"] += summary.prompt_tokens
        counts["OutputTokens"] += summary.generated_tokens
        counts["Disconnects"] += summary.is_disconnected
        for name in counted_as(summary):
            counts[name] += 1

    def flush(self) -> None:
        """Write the requests since the last line; a line of zeros is written, too."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTERS, 0)
        values, self._values = self._values, {}
        units = dict.fromkeys([*counts, *(gauges := self.gauges())], COUNT)
        units |= dict.fromkeys(values, MILLISECONDS)
        self._write(units, {**counts, **gauges, **values})

    def write_start(self, phase_seconds: Mapping[str, float]) -> None:
        """Write the durations of a start in milliseconds, by upstream's names."""
        times = {
            "DownloadModel": phase_seconds.get("download", 0.0),
            "LoadModel": phase_seconds.get("engine", 0.0),
            "StartupLatency": sum(phase_seconds.values()),
        }
        milliseconds = {name: round(seconds * 1000, 3) for name, seconds in times.items()}
        self._write(dict.fromkeys(times, MILLISECONDS), milliseconds)

    def _write(self, units: Mapping[str, str], values: Mapping[str, object]) -> None:
        directive = {
            "Namespace": self.namespace,
            "Dimensions": [["Model"]],
            "Metrics": [{"Name": name, "Unit": unit} for name, unit in units.items()],
        }
        metadata = {"Timestamp": int(self.now() * 1000), "CloudWatchMetrics": [directive]}
        line = {"_aws": metadata, "Model": self.model(), **values}
        self.write(orjson.dumps(line).decode())
