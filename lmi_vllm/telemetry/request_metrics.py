"""`log_request_metric`: token figures of so many requests, as one line of the log."""

import logging
from dataclasses import dataclass, field
from typing import Final

from lmi_vllm.telemetry.records import RequestSummary

logger = logging.getLogger(__name__)

PERCENTILES: Final = (50, 90)


@dataclass(slots=True)
class RequestMetricLog:
    """Collects `every` requests that generated tokens, then writes their percentiles."""

    every: int
    _values: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, summary: RequestSummary) -> None:
        """Take one request; the last of `every` writes the line."""
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


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that `percent` of all do not exceed (nearest rank), rounded."""
    ranked = sorted(values)
    rank = -(-len(ranked) * percent // 100)  # rounded up
    return round(ranked[max(0, int(rank) - 1)], 3)
