"""The GPU suite without a GPU: its checks of answers pass, the others say what they need.

The whole of it is `make gpu`; here only what one server is enough for.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = (
    "readme requests", "base beside adapters", "log probabilities", "structured output",
    "sleep and wake",
)  # fmt: skip

pytestmark = pytest.mark.vllm


def test_suite_reports_passed_and_skipped_checks(tmp_path: Path) -> None:
    """With one report; the exit code is the number of failures."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    command = [sys.executable, "-m", "integration.gpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", ",".join(CHECKS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "none: every check in its CPU form" in report
    for name in CHECKS:
        verdict = "SKIP" if name == "sleep and wake" else "PASS"
        assert f"| {name} | {verdict} |" in report
    assert "needs a GPU: vLLM's sleep mode is for CUDA and HIP" in report
    assert not list(tmp_path.glob("scratch-*"))


def test_unknown_check_is_refused(tmp_path: Path) -> None:
    """With the names there are."""
    command = [sys.executable, "-m", "integration.gpu", "--out", str(tmp_path), "--only", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sleep and wake" in done.stderr
