"""How long each file of tests takes, so that the longest are given to the workers first.

`python -m scripts.run_together -p tests.support.file_seconds` runs everything and writes the table
again. Only the order depends on it: figures of another machine are as good.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = Path(__file__).with_suffix(".json")
_UNKNOWN: Final = 30  # seconds of a file that is not in the table: neither first nor last


def read() -> Mapping[str, float]:
    """Return the seconds of each file."""
    seconds: Mapping[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))
    return seconds


def sort_longest_first(items: list[pytest.Item]) -> None:
    """Order tests by the seconds of their files; those of one file keep their order."""
    seconds = read()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], _UNKNOWN))


class _Recorder:
    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the part of a test that has ended, in any worker."""
        self._seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        """Write the table, beginning with the longest."""
        rows = {file: round(seconds) for file, seconds in self._seconds.most_common()}
        TABLE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Record, but not in a worker: the process that starts them sees every test."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())
