"""Environments of clients that pin older libraries than ours: made once, of a list of versions.

What this environment has in the same version is linked, file by file; pip installs the rest.
"""

import re
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import pytest

_LONGEST: Final = 550  # seconds of one installation
_PIN: Final = re.compile(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", re.MULTILINE)


def environment(folder: Path, versions: Path) -> Path:
    """Return the interpreter of an environment with those versions; renewed if they differ."""
    stamp, python = folder / versions.name, folder / "bin" / "python"
    pins = {match[0]: _ours(match[1], match[2]) for match in _PIN.finditer(versions.read_text())}
    wanted = [pin for pin, ours in pins.items() if ours is None]
    made_of = "\n".join((*pins, "installed:", *wanted))
    if stamp.is_file() and stamp.read_text() == made_of:
        return python
    for command in (
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
        # Most of their modules are never imported: compiling each was half of the time.
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps",
         "--no-compile", *wanted],
    ):  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LONGEST, check=False
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-300:]
            pytest.skip(f"needs {versions.name} from the package index: {said}")
    (site,) = folder.glob("lib/python*/site-packages")
    for ours in filter(None, pins.values()):
        _link(ours, site)
    stamp.write_text(made_of)
    return python


def _ours(name: str, version: str) -> Distribution | None:
    """Return what is installed here, where it is that version and says which files it has."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return found if found.version == version and found.files else None


def _link(ours: Distribution, site: Path) -> None:
    for file in ours.files or ():
        place = site / file
        if ".." not in file.parts and not place.exists():  # not its commands
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file.locate())
