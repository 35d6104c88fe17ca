"""The memory that this process may still take: of the machine, and of its container."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple


class _Version(NamedTuple):
    """Where a version of control groups is, its controller in /proc/self/cgroup, and its files."""

    mount: str
    controller: str
    limit: str
    usage: str
    files: tuple[str, str]  # words of memory.stat: files in memory, used lately or not
    mapped: str  # of them, and of shared memory, what a process has mapped: libraries that run


_VERSIONS: Final = (
    _Version(
        "", "", "memory.max", "memory.current", ("inactive_file", "active_file"), "file_mapped"
    ),
    _Version(
        "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"), "total_mapped_file",
    ),
)  # fmt: skip


class GroupMemory(NamedTuple):
    """The memory of a control group: bytes of its limit, and of it what may still be taken.

    The kernel gives the place of files in memory to who asks for it, but for mapped ones.
    """

    limit: int
    free: int


def free_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take: of the machine, or of its control groups."""
    limits = [group.free for group in _groups(root)]
    if available := _stated(root / "proc/meminfo").get("MemAvailable:"):
        limits.append(available * 1024)
    return min(limits, default=None)


def total_host_memory(root: Path = Path("/")) -> int | None:
    """Bytes of the container's limit, or of the machine; None where Linux does not tell."""
    if (container := container_memory(root)) is not None:
        return container.limit
    return _stated(root / "proc/meminfo").get("MemTotal:", 0) * 1024 or None


def container_memory(root: Path = Path("/")) -> GroupMemory | None:
    """Return the memory of the container, the group that is mounted; None if it has no limit."""
    total = _stated(root / "proc/meminfo").get("MemTotal:", 0) * 1024
    mounted = (_group(root / "sys/fs/cgroup" / each.mount, each) for each in _VERSIONS)
    return next((group for group in mounted if group and group.limit < total), None)


def memory_place(root: Path = Path("/")) -> str:
    """Return in words what bounds the memory that this process may take: container or machine."""
    container, free = container_memory(root), free_host_memory(root)
    if container is None or free is None or container.free > free:
        return "this machine"
    return f"this container (its limit is {container.limit / (1 << 30):.2f} GiB)"


def _groups(root: Path) -> Iterator[GroupMemory]:
    """Yield the groups of this process that have a limit."""
    for version in _VERSIONS:
        for folder in _folders(root, version):
            if (group := _group(folder, version)) is not None:
                yield group


def _folders(root: Path, version: _Version) -> Iterator[Path]:
    """Yield the folder that is mounted, which is a container's own group, and those below it."""
    folder = root / "sys/fs/cgroup" / version.mount
    yield folder
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    fields = (line.split(":", 2) for line in lines if line.count(":") > 1)
    own = (where for _, names, where in fields if version.controller in names.split(","))
    for part in Path(next(own, "/")).parts[1:]:
        folder /= part
        yield folder


def _group(folder: Path, version: _Version) -> GroupMemory | None:
    limit, used = _number(folder / version.limit), _number(folder / version.usage)
    if limit is None or used is None:
        return None
    figures = _stated(folder / "memory.stat")
    files = sum(figures.get(word, 0) for word in version.files) - figures.get(version.mapped, 0)
    return GroupMemory(limit, max(0, limit - max(0, used - max(0, files))))


def _number(path: Path) -> int | None:
    """Return the number that is all of a file; None for `max`, or without the file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stated(path: Path) -> Mapping[str, int]:
    """Return the numbers of a file by the words before them; none without the file."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in map(str.split, lines) if len(words) > 1}
