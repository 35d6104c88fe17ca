"""At the end of a run: how many real engines it has started; too many fail it."""

import pytest
from hypothesis import settings

from tests.support.engine_starts import STARTS

# Its 200 ms for an example are a matter of the machine's other work.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the starts of each suite."""
    for line in STARTS.lines():
        terminalreporter.write_line(line, red=STARTS.is_over_budget)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that would have passed, but for its starts."""
    if STARTS.is_over_budget and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
