"""LMI's `log_request_metric`: percentiles of every N requests, as one line of the log."""

import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import FILE, option, ours
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.features.metrics import percentile
from lmi_vllm.telemetry.records import RequestSummary

if TYPE_CHECKING:
    from lmi_vllm.server.context import ModelContext

logger = logging.getLogger(__name__)

PERCENTILES: Final = (50, 90)


class PercentileSettings(FeatureSettings):
    """Whether such lines are written, and how often."""

    section: ClassVar[str] = "Server"

    # fmt: off
    log_request_metric: bool = option(parse.boolean, ours(), default=False, written=(FILE,),
        note="Log latency and throughput of requests.")
    metrics_aggregation: int = option(parse.positive_int, ours(), default=1000, written=(FILE,),
        values="requests", note="Requests between two such lines.")
    # fmt: on


@contextlib.asynccontextmanager
async def logging_request_metrics(model: "ModelContext") -> AsyncIterator[None]:
    """Write the lines, where the model's settings ask for them, while the body runs."""
    asked, observers = model.settings.feature(PercentileSettings), model.service.telemetry.observers
    lines = RequestMetricLog(asked.metrics_aggregation)
    if asked.log_request_metric:
        observers.append(lines)
    yield
    if lines in observers:
        observers.remove(lines)


@dataclass(slots=True, eq=False)
class RequestMetricLog:
    """Collects `every` requests that generated tokens, then writes their percentiles."""

    every: int
    _values: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, summary: RequestSummary) -> None:
        """Add one request; each `every`th writes the line."""
        if not summary.generated_tokens or summary.is_disconnected:
            return
        self._add("OutputTokens", summary.generated_tokens)
        self._add("TokenThroughput", summary.generated_tokens / max(summary.seconds, 1e-9))
        if summary.token_seconds is not None:
            self._add("TokenLatency", summary.token_seconds * 1000)
        if len(self._values["OutputTokens"]) >= self.every:
            self._log()

    def _add(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def _log(self) -> None:
        values, self._values = self._values, {}
        units = {"TokenLatency": "ms", "TokenThroughput": "tokens/s", "OutputTokens": "tokens"}
        found = {
            name: {f"p{percent}": percentile(values[name], percent) for percent in PERCENTILES}
            for name in units
            if name in values
        }
        shown = ", ".join(
            f"{name} " + " ".join(f"{p}={value:g}" for p, value in figures.items()) + f" {unit}"
            for name, unit in units.items()
            if (figures := found.get(name))
        )
        logger.info("%d requests: %s", self.every, shown, extra={"fields": {"requests": found}})
