"""Which tests are long or slow; at the end of a run, how many real engines it has started.

Too many of these fail it. Workers get the files of tests in the order of their length.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.engine_starts import STARTS
from tests.support.file_seconds import sort_longest_first
from tests.support.long_tests import LONG, is_long, is_slow

# Read when torch and numpy are imported, also by programs that tests start. On a busy machine a
# second thread waits for the first by spinning, up to 100 times longer than the work takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Its 200 ms for an example are a matter of the machine's other work.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where long tests are left out, files of nothing else are not imported: it takes seconds."""
    if config.option.markexpr != "not long" or not collection_path.is_relative_to(config.rootpath):
        return None
    return collection_path.relative_to(config.rootpath).as_posix() in LONG or None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves to `make test-all`, and `make unit` to `make check`.

    The last long file of a worker is what the others wait for, so those come first.
    """
    if hasattr(config, "workerinput"):
        sort_longest_first(items)
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)  # beside pytest's last line, where a reader of CI's log looks
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the starts of each suite."""
    for line in STARTS.lines():
        terminalreporter.write_line(line, red=STARTS.is_over_budget)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """Add what one of several workers has started; it may have died."""
    for suite, seconds in getattr(node, "workeroutput", {}).get("engine_starts", {}).items():
        STARTS.seconds.setdefault(suite, []).extend(seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that would have passed, but for its starts: those of all workers."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["engine_starts"] = STARTS.seconds
        return
    if STARTS.is_over_budget and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
