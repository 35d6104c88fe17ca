"""The few series that the console watches, summed whatever their labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from lmi_vllm.features.console.snapshot import read_snapshot


def test_snapshot_sums_over_engines_and_prefers_their_own_series() -> None:
    """Two engines count together; ours is read only where the engine has none."""
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "-", ("engine",), registry=registry)
    running.labels("0").set(2)
    running.labels("1").set(3)
    Counter("vllm:generation_tokens", "-", registry=registry).inc(7)
    Counter("lmi_generated_tokens", "-", ("adapter",), registry=registry).labels("a").inc(1)
    Counter("lmi_prompt_tokens", "-", ("adapter",), registry=registry).labels("a").inc(5)
    found = read_snapshot(registry)
    assert found.gauges == {"running": 5}
    assert found.counters == {"generated_tokens": 7, "prompt_tokens": 5}


def test_snapshot_adds_histograms_bound_by_bound() -> None:
    """Cumulative counts by upper bound; infinity is no number in JSON."""
    registry = CollectorRegistry()
    histogram = Histogram(
        "lmi_request_duration_seconds", "-", ("dialect",), buckets=(1, 2), registry=registry
    )
    histogram.labels("lmi").observe(0.5)
    histogram.labels("openai").observe(1.5)
    histogram.labels("openai").observe(9)
    assert read_snapshot(registry).histograms == {"request": [(1, 1), (2, 2), (None, 3)]}


def test_snapshot_counts_answers_of_the_model_only() -> None:
    """Health checks and the console itself are of the server's dialect."""
    registry = CollectorRegistry()
    requests = Counter(
        "lmi_requests", "-", ("route", "dialect", "adapter", "status"), registry=registry
    )
    requests.labels("/invocations", "lmi", "base", "200").inc(2)
    requests.labels("/v1/completions", "openai", "base", "200").inc()
    requests.labels("/ping", "server", "base", "200").inc(50)
    assert read_snapshot(registry).answers == {"200": 3}
