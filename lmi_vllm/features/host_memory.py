"""The memory that this process may still take: of the machine, and of its container."""

from pathlib import Path
from typing import Final

# Files with limit and usage of a control group, versions 2 and 1, with the word of memory.stat for
# files in memory that were not used lately: the kernel gives their place to who asks for it.
_CGROUP_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group."""
    limits = [left for left in (_available(root), _of_group(root)) if left is not None]
    return min(limits, default=None)


def counts_read_files(root: Path = Path("/")) -> bool:
    """Whether what is left is that of a control group, which counts files in memory as used."""
    machine, group = _available(root), _of_group(root)
    return group is not None and (machine is None or group < machine)


def _of_group(root: Path) -> int | None:
    found = (_group(root, *names) for names in _CGROUP_FILES)
    return min((left for left in found if left is not None), default=None)


def _available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(size) * 1024 for size in sizes), None)


def _group(root: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes that the container has left (its own group is the root it sees); None: no limit."""
    folder = root / "sys/fs/cgroup"
    try:
        highest, used = (folder / limit).read_text().strip(), (folder / usage).read_text().strip()
    except OSError:
        return None
    if not (highest.isdigit() and used.isdigit()):
        return None
    files = _stated((folder / usage).with_name("memory.stat"), reclaimable)
    return max(0, int(highest) - max(0, int(used) - files))


def _stated(path: Path, word: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{word} ")), 0)
