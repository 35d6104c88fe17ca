"""The tests that start engines, three at a time; the few that failed there once more, alone.

`python scripts/run_together.py [pytest's arguments]`. A test that fails alone too is a failure.
So are failures in more than MAX_RETRIED files, and every end of pytest that is not about single
tests. Files are counted: the tests of one fail together where their server has not started.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

# Of two cores, two workers leave a quarter idle: scenarios wait for drains, deadlines and signals.
# A file stays with one worker, so that its tests share their servers.
TOGETHER: Final = ("-n", "3", "--dist", "loadfile", "--max-worker-restart=2", "--durations=40")
TESTS: Final = ("tests/contract", "tests/fuzz", "integration")
MAX_RETRIED: Final = 5
_PASSED, _FAILED = 0, 1  # pytest's exit codes


def run_together(tests: Sequence[str], arguments: Sequence[str], root: Path, notes: Path) -> int:
    """Return 0 when every test passed, beside others or then alone; pytest keeps `notes`."""
    code, failed = _run([*TOGETHER, *tests, *arguments], root, notes / "together")
    if code != _FAILED or not failed:
        return code
    files = {test.partition("::")[0] for test in failed}
    if len(files) > MAX_RETRIED:
        print(
            f"run_together: tests of {len(files)} files failed: too many to try again", flush=True
        )
        return code
    print(f"===== {len(failed)} failed beside others: once more, alone", flush=True)
    code, still = _run(failed, root, notes / "alone")
    passed = [test for test in failed if test not in still]
    for end, names in (("passed alone", passed), ("failed alone", still)):
        if names and (code == _PASSED or still):
            print(f"failed beside others, {end}: {', '.join(names)}", flush=True)
    return code


def _run(arguments: Sequence[str], root: Path, notes: Path) -> tuple[int, Sequence[str]]:
    """Run pytest; returns its exit code and the tests that failed."""
    cache = ("--cache-clear", "-o", f"cache_dir={notes}")
    command = [sys.executable, "-m", "pytest", *cache, "-ra", *arguments]
    code = subprocess.run(command, cwd=root, check=False).returncode
    return code, list(_failed(notes))


def _failed(notes: Path) -> Iterator[str]:
    """Yield the tests that pytest has noted as failed."""
    path = notes / "v" / "cache" / "lastfailed"
    if path.exists():
        yield from json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lmi-vllm-tests-") as folder:
        sys.exit(run_together(TESTS, sys.argv[1:], Path(__file__).parents[1], Path(folder)))
