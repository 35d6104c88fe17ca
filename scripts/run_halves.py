"""Two halves of the tests side by side; the few that failed there once more, alone, said loudly.

`python scripts/run_halves.py [pytest's arguments]`. A test that fails alone too is a failure, and
so are more than MAX_RETRIED failures, and every end of pytest that is not about single tests.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Final

# About the same length: 20 minutes each, side by side on two cores.
HALVES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({
    "one half": (
        "tests/contract", "tests/fuzz", "integration", "--ignore-glob=integration/[f-z]*",
    ),
    "other half": ("integration", "--ignore-glob=integration/[a-e]*"),
})  # fmt: skip
MAX_RETRIED: Final = 5
LAST_LINES: Final = 15
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5  # pytest's exit codes
# Of pytest's lines for people: how much is shown at once depends on them, nothing else does.
_BEGINNING: Final = " test session starts "
_REPORT: Final = ("===", "___")


def run_halves(
    halves: Mapping[str, Sequence[str]], arguments: Sequence[str], root: Path, notes: Path
) -> int:
    """Return 0 when every test passed, beside the other half or then alone; pytest keeps `notes`.

    The progress of both comes as it is; what a half says of its failures, once it has ended.
    """
    with ThreadPoolExecutor(len(halves)) as both:
        runs = [
            both.submit(_run_half, name, [*words, *arguments], root, notes / name)
            for name, words in halves.items()
        ]
    ends = [run.result() for run in runs]
    failed = [test for code, tests, _ in ends if code == _FAILED for test in tests]
    if any(_is_hopeless(code, tests) for code, tests, _ in ends):
        for name, (code, _, last_lines) in zip(halves, ends, strict=True):
            if code not in (_PASSED, _NO_TESTS):
                print(f"===== how {name} ended\n{last_lines}", flush=True)
        print(f"run_halves: pytest ended with {[code for code, _, _ in ends]}", flush=True)
        return 1
    if len(failed) > MAX_RETRIED:
        print(f"run_halves: {len(failed)} tests failed: too many to try again", flush=True)
        return 1
    return _try_alone(failed, root, notes / "alone") if failed else 0


def _is_hopeless(code: int, failed: Sequence[str]) -> bool:
    """Whether a half failed in a way that no single test stands for."""
    return code not in (_PASSED, _NO_TESTS, _FAILED) or (code == _FAILED and not failed)


def _run_half(
    name: str, arguments: Sequence[str], root: Path, notes: Path
) -> tuple[int, Sequence[str], str]:
    """Run pytest; returns its exit code, the tests that failed and the end of what it printed."""
    process = subprocess.Popen(
        _command(["--durations=30", *arguments], notes),
        cwd=root, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith(_REPORT) and _BEGINNING not in line:
                report = line + lines.read()
                break
            print(f"{name}: {line}", end="", flush=True)
        else:
            report = ""
    code = process.wait()
    print(f"===== {name}\n{report}===== {name} ended with {code}", flush=True)
    # Of a log of which only the end is kept, the half that ended first would say nothing.
    return code, list(_failed(notes)), "".join(report.splitlines(keepends=True)[-LAST_LINES:])


def _try_alone(failed: Sequence[str], root: Path, notes: Path) -> int:
    print(f"===== {len(failed)} failed beside the other half: once more, alone", flush=True)
    again = subprocess.run(_command(failed, notes), cwd=root, check=False)
    still = list(_failed(notes))
    passed = [test for test in failed if test not in still]
    if again.returncode not in (_PASSED, _FAILED) or (again.returncode == _FAILED and not still):
        print(f"run_halves: pytest ended with {again.returncode}", flush=True)
        return 1
    for text, tests in (
        ("failed beside the other half, passed alone", passed),
        ("failed beside the other half, failed alone", still),
    ):
        if tests:
            print(f"{text}: {', '.join(tests)}", flush=True)
    return again.returncode


def _command(arguments: Sequence[str], notes: Path) -> list[str]:
    """Return pytest's command; it writes down in `notes` which tests failed."""
    start = (sys.executable, "-m", "pytest", "--cache-clear", "-o", f"cache_dir={notes}", "-ra")
    return [*start, *arguments]


def _failed(notes: Path) -> Iterator[str]:
    """Yield the tests that pytest has noted as failed."""
    path = notes / "v" / "cache" / "lastfailed"
    if path.exists():
        yield from json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lmi-vllm-tests-") as folder:
        sys.exit(run_halves(HALVES, sys.argv[1:], Path(__file__).parents[1], Path(folder)))
