"""What one benchmark sets for its servers does not reach the next one's."""

import os

import pytest

from integration.bench.__main__ import own_environment
from integration.bench.servers import STEP_VARIABLE


def failing_benchmark() -> None:
    """Pace the engines, and fail."""
    with own_environment():
        os.environ[STEP_VARIABLE] = "40"
        os.environ["LMI_SOMETHING"] = "changed"
        raise SystemExit(1)


def test_a_benchmark_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it fails: a paced engine would make the next throughput meaningless."""
    monkeypatch.delenv(STEP_VARIABLE, raising=False)
    monkeypatch.setenv("LMI_SOMETHING", "before")
    with pytest.raises(SystemExit):
        failing_benchmark()
    assert STEP_VARIABLE not in os.environ
    assert os.environ["LMI_SOMETHING"] == "before"
