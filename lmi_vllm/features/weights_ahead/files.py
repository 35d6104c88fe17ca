"""Which files vLLM reads a model's weights from, in which order, and on which file system."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

# vLLM's load formats whose files are read through the page cache, and the kinds of files that each
# takes: the first of which there are some. The others stream weights, pass the cache by, give each
# rank files of its own, or make weights up.
KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "auto": ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt"),
        "hf": ("*.safetensors", "*.bin", "*.pt"),
        "safetensors": ("*.safetensors",),
        "mistral": ("consolidated*.safetensors",),
        "bitsandbytes": ("*.safetensors", "*.bin"),
        "pt": ("*.pt",),
    }
)
_OF_TRAINING: Final = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt",
                       "scaler.pt")  # fmt: skip
_MOUNTS: Final = Path("/proc/self/mountinfo")


def weight_files(folder: Path, load_format: str) -> tuple[Path, ...]:
    """Return the files in vLLM's order; none for a format or folder without any."""
    for kind in KINDS.get(load_format, ()):
        if found := [path for path in folder.glob(kind) if not path.name.endswith(_OF_TRAINING)]:
            base = "consolidated" if kind.startswith("consolidated") else "model"
            named = _named_in(folder / f"{base}.safetensors.index.json")
            kept = [path for path in found if path.name in named] or found
            return tuple(sorted(kept, key=_numbered))
    return ()


def file_system(path: Path) -> str:
    """Return the type of the file system, such as `ext4`; empty if it is not known."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(" - ")[2] for line in mounts if line.split()[2] == number)
    return next(found, "").partition(" ")[0]


def _named_in(index: Path) -> set[str]:
    """Return the files that an index names; none without one that can be read."""
    try:
        return set(map(str, json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # `checks/weight_files.py` has refused an index that is no index


def _numbered(path: Path) -> list[tuple[int, str]]:
    """Return what sorts `model-2` before `model-10`."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
