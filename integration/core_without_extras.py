"""The core's own tests pass where every extra has been deleted, with the tests of each."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.package_copies import EXTRAS, package_without

ROOT = Path(__file__).parent.parent
# What looks at the repository as a whole, or at vLLM, is not about the core alone.
ROOMS = (
    "adapters", "checks", "config", "engine", "inference", "server", "sources", "telemetry",
    "translate", "web",
)  # fmt: skip


def test_core_passes_its_tests_without_any_extra(tmp_path: Path) -> None:
    """Nothing in them needs what is gone."""
    folder = package_without(EXTRAS, tmp_path)
    for path in ROOT.iterdir():
        if path.name not in ("lmi_vllm", "tests") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    without = shutil.ignore_patterns("extras", "__pycache__", "fuzz")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=without)
    rooms = [f"tests/unit/{room}" for room in ROOMS if (folder / "tests/unit" / room).is_dir()]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command.append("--ignore=tests/unit/config/test_pages.py")  # pages describe extras, too
    done = subprocess.run(
        [*command, *rooms, "tests/web", "tests/server"],
        cwd=folder, env=environ, text=True, capture_output=True, timeout=1500, check=False,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert (done.returncode, failed) == (0, []), done.stdout[-8000:] + done.stderr[-2000:]
