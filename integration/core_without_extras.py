"""The core's own tests pass where extras have been deleted: every one, and each in turn.

Each in turn takes a quarter of an hour, with LMI_TEST_EACH_EXTRA=1. That a server starts, answers
and explains without each is in `tests/unit/test_deletable_extras.py`, at any time.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.package_copies import EXTRAS, package_without

ROOT = Path(__file__).parent.parent
# What looks at the repository as a whole, or at vLLM, is not about the core alone.
ROOMS = (
    "tests/unit/adapters", "tests/unit/checks", "tests/unit/config", "tests/unit/engine",
    "tests/unit/inference", "tests/unit/server", "tests/unit/sources", "tests/unit/telemetry",
    "tests/unit/translate", "tests/web", "tests/server",
)  # fmt: skip
# Those in which extras act most; the others' tests take twice the time of these.
ROOMS_OF_ONE = (
    "tests/unit/adapters", "tests/unit/server", "tests/unit/sources", "tests/unit/translate",
    "tests/web", "tests/server",
)  # fmt: skip


def failed_without(names: Collection[str], rooms: Collection[str], folder: Path) -> list[str]:
    """Return the core's tests that fail in a copy of the package without these extras."""
    package_without(names, folder)
    for path in ROOT.iterdir():
        if path.name not in ("lmi_vllm", "tests") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    without = shutil.ignore_patterns("extras", "__pycache__", "fuzz")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=without)
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command.append("--ignore=tests/unit/config/test_pages.py")  # pages describe extras, too
    done = subprocess.run(
        [*command, *(room for room in rooms if (folder / room).is_dir())],
        cwd=folder, env=environ, text=True, capture_output=True, timeout=1500, check=False,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode in (0, 1), done.stdout[-8000:] + done.stderr[-2000:]
    return failed


def test_core_passes_its_tests_without_any_extra(tmp_path: Path) -> None:
    """Nothing in them needs what is gone."""
    assert failed_without(EXTRAS, ROOMS, tmp_path) == []


@pytest.mark.skipif(
    os.environ.get("LMI_TEST_EACH_EXTRA") != "1", reason="needs LMI_TEST_EACH_EXTRA=1"
)
@pytest.mark.parametrize("name", EXTRAS)
def test_core_passes_its_tests_without(name: str, tmp_path: Path) -> None:
    """Nor does an extra that is still there: `tests/unit/test_deletable_extras.py` serves so."""
    assert failed_without([name], ROOMS_OF_ONE, tmp_path) == []
