"""Dashboard and alert rules name our metrics as they are; vLLM's: integration/prometheus_*."""

import pytest

from lmi_vllm.features.metrics import ALL as OF_FEATURES
from lmi_vllm.telemetry.metrics import ALL
from tests.support.monitoring import (
    Exposition,
    alert_expressions,
    dashboard,
    dashboard_expressions,
    uses,
    wrong_uses,
)

EXPRESSIONS = sorted({*dashboard_expressions(), *alert_expressions()})


def our_series() -> Exposition:
    """Return every series of ours with its labels, whether it has samples or not."""
    found = Exposition()
    for metric in (*ALL, *OF_FEATURES):
        (family,) = metric.describe()
        endings = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",)}
        for ending in endings.get(family.type, ("",)):
            more = {"le"} if ending == "_bucket" else set()
            found.labels[family.name + ending] = set(metric._labelnames) | more
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_name_our_metrics_as_they_are(expression: str) -> None:
    """Each `lmi_*` name exists, with every label that is asked of it."""
    wrong = wrong_uses(expression, our_series())
    assert [text for text in wrong if text.startswith("lmi_")] == []


def test_every_rule_and_panel_is_read() -> None:
    """None is overlooked by the reader of these tests."""
    assert len(list(alert_expressions())) == 20
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] for panel in panels)
    assert len(EXPRESSIONS) > 40
    assert all(list(uses(expression)) for expression in EXPRESSIONS)


def test_panels_have_ids_places_and_titles_of_their_own() -> None:
    """Grafana would renumber, or draw one over the other."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"][name] for name in "xywh") for panel in panels]
    cells = [
        (column, line)
        for x, y, width, height in places
        for column in range(x, x + width)
        for line in range(y, y + height)
    ]
    assert len(set(cells)) == len(cells)
    assert max(x + width for x, _, width, _ in places) == 24


def test_every_metric_of_ours_that_can_move_is_on_the_dashboard() -> None:
    """Except what the drain and files say elsewhere; a new metric is shown, or named here."""
    shown = {use.series.removesuffix("_bucket") for text in EXPRESSIONS for use in uses(text)}
    ours = {name.removesuffix("_bucket") for name in our_series().labels}
    ours = {name for name in ours if not name.endswith(("_count", "_sum"))}
    left_out = {
        "lmi_build_info",  # the variable `instance` is made of it
        "lmi_download_files",
        "lmi_download_files_expected",
        "lmi_drained_requests_total",
        "lmi_engine_sequences",  # of one engine; lmi_requests_in_flight is shown for both
    }
    assert ours - shown == left_out


def test_reader_finds_errors() -> None:
    """A name or a label that is not exported is reported."""
    exported = Exposition.read('# TYPE lmi_a counter\nlmi_a{x="1",y="a b"} 2\nlmi_b 3 4\n')
    assert wrong_uses('sum by (x, instance) (rate(lmi_a{y="a"}[5m]))', exported) == []
    assert wrong_uses("lmi_c", exported) == ["lmi_c is not exported"]
    assert wrong_uses("sum by (z) (lmi_b)", exported) == ["lmi_b has no label z"]
