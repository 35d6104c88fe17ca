"""What a container has left, and whether it has less than the machine."""

from pathlib import Path

import pytest

from lmi_vllm.host_memory import GroupMemory, container_memory, free_host_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("", None),
        ("max", None),
        (str(999 * MIB), GroupMemory(999 * MIB, 899 * MIB)),
        (str(1000 * MIB), None),
    ],
)
@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("", ("memory.max", "memory.current")),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["version 2", "version 1"],
)
def test_limit_below_the_machine_s_memory(
    limit: str, found: GroupMemory | None, folder: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """However much of it is available: vLLM compares with all of it."""
    (tmp_path / "proc").mkdir()
    text = f"MemTotal: {1000 * 1024} kB\nMemAvailable: 10 kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    if limit:
        for name, value in zip(names, (limit, str(100 * MIB)), strict=True):
            (group / name).write_text(f"{value}\n")
    assert container_memory(tmp_path) == found


@pytest.mark.parametrize(
    ("folder", "names", "words"),
    [
        (
            "",
            ("memory.max", "memory.current"),
            ("inactive_file", "active_file", "file_mapped"),
        ),
        (
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("total_inactive_file", "total_active_file", "total_mapped_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_files_in_memory_are_free_memory(
    folder: str, names: tuple[str, str], words: tuple[str, str, str], tmp_path: Path
) -> None:
    """The kernel drops them for who asks for their place, but not libraries that run."""
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for name, mib in zip(names, (1000, 700), strict=True):
        (group / name).write_text(f"{mib * MIB}\n")
    assert free_host_memory(tmp_path) == 300 * MIB
    for *figures, expected in (
        (600, 0, 0, 900),
        (300, 300, 0, 900),
        (300, 300, 200, 700),
        (100, 0, 200, 300),  # shared memory that is mapped is no file
        (800, 0, 0, 1000),  # read a moment later
    ):
        lines = [f"{word} {mib * MIB}\n" for word, mib in zip(words, figures, strict=True)]
        (group / "memory.stat").write_text("".join(["cache 9\n", *lines, "unevictable 0\n"]))
        assert free_host_memory(tmp_path) == expected * MIB


@pytest.mark.parametrize(
    ("mount", "line", "names"),
    [
        ("", "0::", ("memory.max", "memory.current")),
        ("memory", "4:memory:", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
    ids=["version 2", "version 1"],
)
def test_every_group_of_the_process_counts(
    mount: str, line: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """A unit of systemd has its limit below the root; a parent may have a lower one."""
    (tmp_path / "proc/self").mkdir(parents=True)
    groups = f"7:cpu,cpuacct:/other\n{line}/system.slice/lmi.service\n"
    (tmp_path / "proc/self/cgroup").write_text(groups)
    own = tmp_path / "sys/fs/cgroup" / mount / "system.slice/lmi.service"
    own.mkdir(parents=True)
    for folder, highest in ((own, 800), (own.parent, 600)):
        for name, mib in zip(names, (highest, 100), strict=True):
            (folder / name).write_text(f"{mib * MIB}\n")
        expected = (highest - 100) * MIB
        assert free_host_memory(tmp_path) == expected
