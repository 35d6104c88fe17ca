"""The dashboard and the alert rules as text: their expressions, and the series these name."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[2] / "config"
DASHBOARD = CONFIG / "grafana" / "lmi-vllm.json"
PROMETHEUS = CONFIG / "prometheus"
# What Prometheus adds to every series it scrapes, and a series of its own.
TARGET_LABELS = frozenset({"instance", "job"})
OWN_SERIES = frozenset({"up"})
_SERIES = re.compile(r"((?:vllm:|lmi_|process_|python_|up\b)[a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\bby\s*\(([^)]*)\)")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True)
class Use:
    """A series that some expression names, and the labels it asks of it."""

    series: str
    labels: frozenset[str]


@dataclass
class Exposition:
    """What a server exports: the labels of each series, by the name of its samples."""

    labels: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Exposition":
        """Return what the text of /metrics has; a metric without samples has no labels yet."""
        found = cls()
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                endings = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
                for ending in endings:
                    found.labels.setdefault(name + ending, set())
            elif line and not line.startswith("#"):
                name, _, rest = line.partition("{")
                names = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', rest) if rest else []
                found.labels.setdefault(name.split()[0], set()).update(names)
        return found


def dashboard() -> Mapping[str, Any]:
    """Return the dashboard."""
    document: Mapping[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def dashboard_expressions() -> Iterator[str]:
    """Yield every expression of the dashboard, its variables filled in."""
    document = dashboard()
    found = [one["expr"] for panel in document["panels"] for one in panel.get("targets", ())]
    found += [one["expr"] for one in document["annotations"]["list"]]
    for text in found:
        yield text.replace("$__rate_interval", "1m").replace("$instance", ".*")


def alert_expressions() -> Iterator[str]:
    """Yield every expression of the alert rules."""
    rules = (PROMETHEUS / "alerts.yml").read_text(encoding="utf-8")
    for text in re.findall(r"^ +expr: (.*\n(?: {10,}\S.*\n)*)", rules, re.MULTILINE):
        yield " ".join(text.removeprefix(">-").split())


def uses(expression: str) -> Iterator[Use]:
    """Yield what an expression names; labels it groups by count for every series in it."""
    grouped = {name.strip() for names in _GROUPED.findall(expression) for name in names.split(",")}
    for series, matchers in _SERIES.findall(expression):
        yield Use(series, frozenset(grouped | set(_MATCHER.findall(matchers))))


def wrong_uses(expression: str, exported: Exposition) -> list[str]:
    """Return what an expression asks for that the server does not export."""
    found = []
    for use in uses(expression):
        if use.series in OWN_SERIES:
            continue
        if use.series not in exported.labels:
            found.append(f"{use.series} is not exported")
            continue
        missing = use.labels - exported.labels[use.series] - TARGET_LABELS
        found += [f"{use.series} has no label {name}" for name in sorted(missing)]
    return found
