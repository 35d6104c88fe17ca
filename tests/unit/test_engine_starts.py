"""A run says how many engines it has started, and fails where it started too many."""

import sys
from pathlib import Path

import pytest

from tests.support.engine_starts import BUDGETS

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent.parent
CASE = """
from tests.support.engine_starts import STARTS

import pytest

@pytest.mark.parametrize("number", range({count}))
def test_that_starts(number):
    STARTS.add("contract", 1.5)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "two workers"])
@pytest.mark.parametrize(("more", "code"), [(0, 0), (1, 1)])
def test_more_starts_than_the_budget_fail_the_run(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    more: int,
    code: int,
    workers: tuple[str, ...],
) -> None:
    """Every test has passed, and the line says which number is too high."""
    count = BUDGETS["contract"] + more
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{':'.join(sys.path)}")
    pytester.makeconftest((ROOT / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(CASE.format(count=count))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *workers)
    result.assert_outcomes(passed=count)
    assert result.ret == code
    line = f"contract: started {count} engines, {1.5 * count:.0f} s (budget {BUDGETS['contract']},*"
    result.stdout.fnmatch_lines([line + (": TOO MANY*" if more else ".py)")])
