"""What fails beside the other half of the tests is tried once more, alone, and named."""

from pathlib import Path

import pytest

from scripts.run_halves import MAX_RETRIED, run_halves

HALVES = {"one": ("test_one.py",), "two": ("test_two.py",)}
PASSES = "def test_passes(): pass\n"
FAILS_ONCE = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("way", ["a b::c/d"])
def test_fails_once(way):
    path = Path(__file__).with_name("seen")
    was_there = path.exists()
    path.touch()
    assert was_there
"""
FAILS = "def test_fails(): assert 0\n"
MANY = "".join(f"def test_{number}(): assert 0\n" for number in range(MAX_RETRIED + 1))
CANNOT_START = "@pytest.fixture\ndef no(): 1 / 0\ndef test_error(no): pass\n"
NO_PYTHON = "def ("
TOO_MANY = """
import pytest

@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("too many engines")

def pytest_sessionfinish(session):
    if session.config.args[0].endswith("one.py"):
        session.exitstatus = 1
"""
ENDS = "import os\ndef test_end(): os._exit(3)\n"
NAMED = "passed alone: test_one.py::test_fails_once[a b::c/d]"


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that happen to be installed take seconds of each run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.mark.parametrize(
    ("one", "two", "code", "said"),
    [
        pytest.param(PASSES, PASSES, 0, "===== two ended with 0", id="all pass"),
        pytest.param(FAILS_ONCE, PASSES, 0, NAMED, id="once"),
        pytest.param(FAILS_ONCE, FAILS, 1, NAMED, id="once beside always"),
        pytest.param(PASSES, FAILS, 1, "failed alone: test_two.py::test_fails", id="always"),
        pytest.param(PASSES, f"import pytest\n{CANNOT_START}", 1, "failed alone", id="error"),
        pytest.param(PASSES, MANY, 1, "6 tests failed: too many", id="many"),
        pytest.param(PASSES, NO_PYTHON, 1, "pytest ended with [0, 2]", id="cannot be collected"),
        pytest.param(PASSES, ENDS, 1, "pytest ended with [0, 3]", id="ends"),
        pytest.param(PASSES, "", 0, "===== two ended with 5", id="nothing to run"),
    ],
)
def test_retry_is_limited_and_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], one: str, two: str, code: int, said: str
) -> None:
    """Only what passes then is forgiven, and never without a message."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(one, encoding="utf-8")
    (tmp_path / "test_two.py").write_text(two, encoding="utf-8")

    assert run_halves(HALVES, ("-q",), tmp_path, tmp_path / "notes") == code
    out = capfd.readouterr().out
    assert said in out
    assert ("passed alone" in out) == (one == FAILS_ONCE)


def test_failed_tests_are_printed_near_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Pytest's short summary of each run, and our line last."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(FAILS_ONCE, encoding="utf-8")
    assert run_halves({"one": ("test_one.py",)}, (), tmp_path, tmp_path / "notes") == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("FAILED test_one.py::test_fails_once") for line in lines)
    assert lines[-1] == f"failed beside the other half, {NAMED}"


def test_reason_of_a_half_without_failed_tests_is_printed_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A log of which only the end is kept says it, though the other half ended after it."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "test_one.py").write_text(PASSES, encoding="utf-8")
    (tmp_path / "test_two.py").write_text(PASSES, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(TOO_MANY, encoding="utf-8")
    assert run_halves(HALVES, (), tmp_path, tmp_path / "notes") == 1
    *_, end = capfd.readouterr().out.partition("===== how one ended")
    assert "too many engines" in end
    assert "how two ended" not in end
    assert end.splitlines()[-1] == "run_halves: pytest ended with [1, 0]"
