"""The alert rules: each fires by a series of its own, and stays silent on a healthy server.

promtool evaluates them, with the simulated series of `alerts.test.yml`.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.support.monitoring import PROMETHEUS

HEALTHY = "a healthy server is left in peace"


def document(name: str) -> Mapping[str, Any]:
    """Return a file of the rules."""
    read: Mapping[str, Any] = yaml.safe_load((PROMETHEUS / name).read_text(encoding="utf-8"))
    return read


def expectations() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of a test and what it expects of one alert at one time."""
    for test in document("alerts.test.yml")["tests"]:
        for expected in test["alert_rule_test"]:
            yield test["name"], expected


def test_alerts_all_fire_once_and_are_silent_once() -> None:
    """No rule is left out of the simulated series."""
    groups = document("alerts.yml")["groups"]
    rules = {rule["alert"] for group in groups for rule in group["rules"]}
    fired = {one["alertname"] for _, one in expectations() if one["exp_alerts"]}
    silent = {one["alertname"] for name, one in expectations() if name == HEALTHY}
    assert (rules - fired, rules - silent) == (set(), set())
    assert not any(one["exp_alerts"] for name, one in expectations() if name == HEALTHY)
    count = len(rules)
    page = (PROMETHEUS.parent / "monitoring.md").read_text(encoding="utf-8")
    assert f"{count} alert rules" in page


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)
@pytest.mark.parametrize(
    "command",
    [
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts.test.yml"),
    ],
    ids=" ".join,
)
def test_alerts_as_promtool_evaluates_them(command: tuple[str, ...]) -> None:
    """The rules parse, and fire and stay silent where alerts.test.yml says so."""
    done = subprocess.run(
        ["promtool", *command[:-1], str(PROMETHEUS / command[-1])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
