"""The memory that this process may still take: of the machine, and of its container."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Of control groups, versions 2 and 1: where their folders are, the controller in /proc/self/cgroup,
# the files with limit and usage, and memory.stat's word for files in memory that were not used
# lately. The kernel gives their place to who asks for it.
_VERSIONS: Final = (
    ("", "", "memory.max", "memory.current", "inactive_file"),
    (
        "memory", "memory",
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
    ),
)  # fmt: skip


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, or of its control group."""
    limits = [left for left in (_available(root), _of_group(root)) if left is not None]
    return min(limits, default=None)


def is_container_limited(root: Path = Path("/")) -> bool:
    """Whether the container, the group that is mounted, may take less than the machine has."""
    total = _stated(root / "proc/meminfo", "MemTotal:") * 1024
    limits = (_number(root / "sys/fs/cgroup" / mount / limit) for mount, _, limit, *_ in _VERSIONS)
    return any(limit is not None and limit < total for limit in limits)


def _of_group(root: Path) -> int | None:
    """Bytes that the groups of this process have left; None without a limit."""
    left = (
        _left(folder, *files)
        for mount, controller, *files in _VERSIONS
        for folder in _folders(root, mount, controller)
    )
    return min((found for found in left if found is not None), default=None)


def _folders(root: Path, mount: str, controller: str) -> Iterator[Path]:
    """Yield the folder that is mounted, which is a container's own group, and those below it."""
    folder = root / "sys/fs/cgroup" / mount
    yield folder
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    fields = (line.split(":", 2) for line in lines if line.count(":") > 1)
    path = next((where for _, names, where in fields if controller in names.split(",")), "/")
    for part in Path(path).parts[1:]:
        folder /= part
        yield folder


def _available(root: Path) -> int | None:
    available = _stated(root / "proc/meminfo", "MemAvailable:")
    return available * 1024 or None


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    highest, used = _number(folder / limit), _number(folder / usage)
    if highest is None or used is None:
        return None
    files = _stated(folder / "memory.stat", reclaimable)
    return max(0, highest - max(0, used - files))


def _number(path: Path) -> int | None:
    """Return the number that is all of a file; None for `max`, or without the file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stated(path: Path, word: str) -> int:
    """Return the number behind a word at the beginning of a line; 0 without it."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{word} ")), 0)
