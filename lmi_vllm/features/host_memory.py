"""The memory that this process may still take: of the machine, and of its container."""

from pathlib import Path
from typing import Final

# Files with limit and usage of a control group, versions 2 and 1.
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group."""
    limits = [
        bytes_free
        for bytes_free in (_available(root), *(_group(root, *names) for names in _CGROUP_FILES))
        if bytes_free is not None
    ]
    return min(limits, default=None)


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(size) * 1024 for size in sizes), None)


def _group(root: Path, limit: str, usage: str) -> int | None:
    """Bytes that the container has left (its own group is the root it sees); None: no limit."""
    folder = root / "sys/fs/cgroup"
    try:
        highest, used = (folder / limit).read_text().strip(), (folder / usage).read_text().strip()
    except OSError:
        return None
    return max(0, int(highest) - int(used)) if highest.isdigit() and used.isdigit() else None
