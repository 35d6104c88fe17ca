"""What one request adds to the counters, and that names chosen by clients cannot add series."""

import re

from prometheus_client import REGISTRY

from lmi_vllm.features.metrics import ALL as OF_FEATURES
from lmi_vllm.telemetry import metrics
from lmi_vllm.telemetry.observers import RequestCounter
from lmi_vllm.telemetry.records import DISCONNECTED, RequestSummary

ROUTE = "/test-of-metrics"


def summary(
    adapter: str = "", status: int = 200, route: str = ROUTE, **fields: object
) -> RequestSummary:
    """Return an ended request of a route that no other module uses."""
    base = ("id", "POST", route, route, "127.0.0.1", status, "test", adapter, 1.5)
    return RequestSummary(*base, is_inference=True, **fields)  # type: ignore[arg-type]


def value(name: str, **labels: str) -> float:
    """Return a sample of the process' registry, 0 where there is none."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


def adapters_counted(route: str) -> set[str]:
    """Return the adapters that have a series of their own under a route."""
    (family,) = metrics.REQUESTS.collect()
    return {
        sample.labels["adapter"] for sample in family.samples if sample.labels["route"] == route
    }


def test_adapters_beyond_the_bound_share_one_label() -> None:
    """However many names there are, and the ones that mean something to us stay ours."""
    count = RequestCounter()
    route = f"{ROUTE}-of-many-adapters"
    for name in ("", "base", "other", *(f"adapter-{number}" for number in range(500))):
        count(summary(name, route=route))
    found = adapters_counted(route)
    assert len(found) == metrics.MAX_ADAPTERS + 2
    assert {"base", "base_", "other_", "adapter-0", "other"} <= found
    labels = {"route": route, "dialect": "test", "adapter": "other", "status": "200"}
    assert value("lmi_requests_total", **labels) == 502 - metrics.MAX_ADAPTERS


def test_a_client_that_went_away_is_counted_with_its_tokens() -> None:
    """The engine did generate them."""
    before = value("lmi_generated_tokens_total", adapter="gone")
    RequestCounter()(summary("gone", DISCONNECTED, generated_tokens=7))
    assert value("lmi_generated_tokens_total", adapter="gone") - before == 7
    assert value("lmi_client_disconnects_total", dialect="test") == 1


def test_times_that_did_not_happen_are_not_observed() -> None:
    """A request that was refused has no first token, and must not count as a fast one."""
    name = "lmi_time_to_first_token_seconds_count"
    before = value(name, dialect="test")
    count = RequestCounter()
    count(summary(status=503))
    assert value(name, dialect="test") == before
    count(summary(first_token_seconds=0.2))
    assert value(name, dialect="test") == before + 1


def test_names_follow_the_conventions() -> None:
    """Prefix, base units, a help text; counters end in _total, which the library adds."""
    for metric in (*metrics.ALL, *OF_FEATURES):
        (family,) = metric.describe()
        assert re.fullmatch(r"lmi_[a-z_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(ms|milliseconds|kb|mb|count|total)$", family.name), family.name
        assert not any(label in ("id", "path", "user") for label in metric._labelnames)
