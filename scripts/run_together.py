"""The tests that start engines, three at a time; the few that failed there once more, alone.

`python -m scripts.run_together [pytest's arguments]`. A test that fails alone too is a failure.
So are more failures than MAX_RETRIED, and every end of pytest that is not about single tests.
Tests whose fixture failed count once for a file: their server has not started.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from integration.forked_server import importing_process
from tests.support.engine_starts import STARTS

# Of two cores, two workers leave a quarter idle: scenarios wait for drains, deadlines and signals.
# A file stays with one worker, so that its tests share their servers; conftest.py orders them.
TOGETHER: Final = (
    "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder",
    "--max-worker-restart=2", "--durations=40",
)  # fmt: skip
CONTRACT: Final = "tests/contract"
TESTS: Final = (CONTRACT, "tests/fuzz", "integration")
MAX_RETRIED: Final = 12  # on a machine half as fast, eight tests of time failed
_PASSED, _FAILED = 0, 1  # pytest's exit codes


def run_together(tests: Sequence[str], arguments: Sequence[str], root: Path, notes: Path) -> int:
    """Return 0 when every test passed, beside others or then alone; `notes` is a folder."""
    code, failed, count, is_over_budget = _run(
        [*TOGETHER, *tests, *arguments], root, notes / "together.json"
    )
    if code != _FAILED or not failed:
        return code
    if count > MAX_RETRIED:
        print(f"run_together: {count} failures: too many to try again", flush=True)
        return code
    print(f"===== {len(failed)} failed beside others: once more, alone", flush=True)
    code, still, _, _ = _run(failed, root, notes / "alone.json")
    passed = [test for test in failed if test not in still]
    for end, names in (("passed alone", passed), ("failed alone", still)):
        if names and (code == _PASSED or still):
            print(f"failed beside others, {end}: {', '.join(names)}", flush=True)
    if code == _PASSED and is_over_budget:  # no test fails for that, so none has been tried again
        print("run_together: too many engines were started, see above", flush=True)
        return _FAILED
    return code


def _run(arguments: Sequence[str], root: Path, notes: Path) -> tuple[int, Sequence[str], int, bool]:
    """Run pytest; returns its exit code, the tests that failed, and how many failures these are.

    The last is whether it has started more engines than it may.
    """
    noted = ("-p", "scripts.run_together", "--notes", str(notes))
    command = [sys.executable, "-m", "pytest", *noted, "-ra", *arguments]
    code = subprocess.run(command, cwd=root, check=False).returncode
    if not notes.exists():
        return code, [], 0, False
    failed, without_fixture, is_over_budget = json.loads(notes.read_text(encoding="utf-8"))
    files = {test.partition("::")[0] for test in without_fixture}
    return code, [*failed, *without_fixture], len(failed) + len(files), is_over_budget


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the contract's files to the worker that is ready first, and others to the rest.

    They import vLLM in the worker's own process and share one engine: a second worker would do both
    again. The others fork their servers from a process of their own.
    """
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (pytest loads it as a plugin)

    class ContractTogether(LoadFileScheduling):  # type: ignore[misc,unused-ignore]
        def _assign_work_unit(self, node: Any) -> None:
            is_first = node is self.nodes[0]
            fitting = (file for file in self.workqueue if file.startswith(CONTRACT) is is_first)
            if file := next(fitting, None):
                self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    return ContractTogether(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `_run` say where this module, as a plugin of its pytest, notes what failed."""
    parser.addoption("--notes", type=Path, help="a file, for scripts/run_together.py")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Note which tests failed themselves, which could not be set up or torn down, and the rest."""
    stats = terminalreporter.stats
    failed = dict.fromkeys(report.nodeid for report in stats.get("failed", ()))
    errors = dict.fromkeys(report.nodeid for report in stats.get("error", ()))
    only_errors = [test for test in errors if test not in failed]
    noted = [[*failed], only_errors, STARTS.is_over_budget]
    config.option.notes.write_text(json.dumps(noted), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lmi-vllm-tests-") as folder, importing_process():
        sys.exit(run_together(TESTS, sys.argv[1:], Path(__file__).parents[1], Path(folder)))
