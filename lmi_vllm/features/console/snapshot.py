"""The few series that the console shows, summed over labels, from the registry of `/metrics`.

The console polls every second or two, and all of `/metrics` is 50 KB and more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lmi_vllm.telemetry.metrics import Collectable

# Name shown -> series: the engine's own, which grow while a request runs, else the server's.
COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total", "lmi_prompt_tokens_total"),
    "generated_tokens": ("vllm:generation_tokens_total", "lmi_generated_tokens_total"),
    "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "disconnects": ("lmi_client_disconnects_total",),
    "engine_restarts": ("lmi_engine_restarts_total",),
}
GAUGES: Final[Mapping[str, str]] = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
HISTOGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "first_token": ("vllm:time_to_first_token_seconds", "lmi_time_to_first_token_seconds"),
    "between_tokens": ("vllm:inter_token_latency_seconds", "lmi_time_per_output_token_seconds"),
    "request": ("lmi_request_duration_seconds",),
}
REQUESTS: Final = "lmi_requests_total"
CACHE: Final = "vllm:cache_config_info"
_ENDINGS: Final = ("_bucket", "_count", "_sum")


@dataclass(slots=True)
class Snapshot:
    """The series at one moment; a series that the process does not have is missing."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    # Cumulative counts by upper bound, in seconds; None is infinity.
    histograms: dict[str, list[tuple[float | None, float]]] = field(default_factory=dict)
    answers: dict[str, float] = field(default_factory=dict)  # by status, inference only
    cache: dict[str, str] = field(default_factory=dict)  # of the engine's KV cache


def read_snapshot(source: Collectable) -> Snapshot:
    """Return the present values of the series in `source`."""
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    snapshot = Snapshot()
    for metric in source.collect():
        for sample in metric.samples:
            if sample.name == CACHE:
                snapshot.cache = dict(sample.labels)
            elif sample.name == REQUESTS:
                _count_answer(snapshot.answers, sample.labels, sample.value)
            elif sample.name.endswith("_bucket"):
                bounds = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + sample.value
            else:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    snapshot.counters = {
        name: next(sums[source] for source in sources if source in sums)
        for name, sources in COUNTERS.items()
        if any(source in sums for source in sources)
    }
    snapshot.gauges = {name: sums[source] for name, source in GAUGES.items() if source in sums}
    snapshot.histograms = {
        name: _rows(next(buckets[source] for source in sources if source in buckets))
        for name, sources in HISTOGRAMS.items()
        if any(source in buckets for source in sources)
    }
    return snapshot


def wanted_series() -> list[str]:
    """Return the names of all series that a snapshot reads."""
    names = [REQUESTS, CACHE, *GAUGES.values()]
    names += [source for sources in COUNTERS.values() for source in sources]
    for sources in HISTOGRAMS.values():
        names += [source + ending for source in sources for ending in _ENDINGS]
    return names


def _count_answer(answers: dict[str, float], labels: Mapping[str, str], value: float) -> None:
    """Count inference answers only: health checks would outnumber them."""
    if labels["dialect"] != "server":
        answers[labels["status"]] = answers.get(labels["status"], 0.0) + value


def _rows(bounds: Mapping[float, float]) -> list[tuple[float | None, float]]:
    return [
        (None if bound == float("inf") else bound, count) for bound, count in sorted(bounds.items())
    ]
