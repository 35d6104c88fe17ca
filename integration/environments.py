"""Environments of clients that pin older libraries than ours: made once, of a list of versions."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

_LONGEST: Final = 550  # seconds of one installation


def environment(folder: Path, versions: Path) -> Path:
    """Return the interpreter of an environment with those versions; made anew where they differ."""
    stamp, python = folder / versions.name, folder / "bin" / "python"
    if stamp.is_file() and stamp.read_bytes() == versions.read_bytes():
        return python
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(versions)],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST, check=False
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-300:]
            pytest.skip(f"needs {versions.name} from the package index: {said}")
    stamp.write_bytes(versions.read_bytes())
    return python
