"""The Prometheus metrics of features, which each counts by itself; what several compute alike."""

from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from lmi_vllm.telemetry.metrics import LATENCIES, gauge

DROPPED_METRIC_LINES: Final = Counter(
    "lmi_metric_lines_dropped",
    "Lines of LMI_METRICS_EMF and of SageMaker's telemetry file that were dropped because what "
    "takes them had stopped, or could not be written.",
)
ENGINE_SEQUENCES: Final = gauge(
    "lmi_engine_sequences",
    "Sequences in the Transformers engine, `running` and `waiting`; vLLM's has series of its own.",
    ("state",),
)
COLD_ADAPTER_SECONDS: Final = Histogram(
    "lmi_cold_adapter_time_to_first_token_seconds",
    "From the headers of a request to its first generated token, where its adapter first had to "
    "come from option.adapter_store.",
    buckets=LATENCIES,
)
ADAPTER_LOOKUPS: Final = Counter(
    "lmi_adapter_store_lookups",
    "Times option.adapter_store was asked for an adapter: found, missing, or the store failed.",
    ("outcome",),
)
ADAPTER_STORE_BYTES: Final = gauge(
    "lmi_adapter_store_bytes", "Bytes of the adapters that are kept of option.adapter_store."
)
STATE_AGE_SECONDS: Final = gauge(
    "lmi_adapters_state_age_seconds",
    "Seconds since option.adapters_state was last read and written in S3; 0 without it.",
)
STATE_MISSING: Final = gauge(
    "lmi_adapters_state_missing",
    "Adapters of option.adapters_state in S3 that this server does not have as they are there.",
)

ALL: Final = tuple(one for one in vars().copy().values() if isinstance(one, MetricWrapperBase))


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that `percent` of all do not exceed (nearest rank), rounded."""
    ranked = sorted(values)
    rank = -(-len(ranked) * percent // 100)  # rounded up
    return round(ranked[max(0, int(rank) - 1)], 3)
