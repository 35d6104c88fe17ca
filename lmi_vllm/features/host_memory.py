"""The memory that this process may still take: of the machine, and of its container."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

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


class Container(NamedTuple):
    """The memory of a container: bytes of its limit, and of that what nothing is in, no file."""

    limit: int
    empty: int


def container_memory(root: Path = Path("/")) -> Container | None:
    """Return the memory of the container, the group that is mounted; None if it has no limit."""
    total = _stated(root / "proc/meminfo", "MemTotal:") * 1024
    for mount, _, limit, usage, _ in _VERSIONS:
        folder = root / "sys/fs/cgroup" / mount
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None and most < total:
            return Container(most, most - used)
    return None


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
