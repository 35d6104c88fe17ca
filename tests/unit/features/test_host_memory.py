"""What a container has left, and whether its limit counts what has been read of files."""

from pathlib import Path

import pytest

from lmi_vllm.features.host_memory import counts_read_files, free_host_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("highest", "is_counted"),
    [("", False), ("max", False), (str(900 * MIB), True), (str(1 << 62), False)],
)
def test_limit_of_a_group_counts_what_was_read(
    highest: str, is_counted: bool, tmp_path: Path
) -> None:
    """Without one the machine's own figure leaves such memory out."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1024000 kB\n")
    if highest:
        folder = tmp_path / "sys/fs/cgroup"
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{highest}\n")
        (folder / "memory.current").write_text(f"{100 * MIB}\n")
    assert counts_read_files(tmp_path) is is_counted


@pytest.mark.parametrize(
    ("folder", "names", "word"),
    [
        ("", ("memory.max", "memory.current"), "inactive_file"),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
    ids=["version 2", "version 1"],
)
def test_files_in_memory_are_free_memory(
    folder: str, names: tuple[str, str], word: str, tmp_path: Path
) -> None:
    """As `MemAvailable` has it: the kernel drops them for who asks for their place."""
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    for name, mib in zip(names, (1000, 700), strict=True):
        (group / name).write_text(f"{mib * MIB}\n")
    assert free_host_memory(tmp_path) == 300 * MIB
    (group / "memory.stat").write_text(f"cache 9\n{word} {600 * MIB}\nunevictable 0\n")
    assert free_host_memory(tmp_path) == 900 * MIB
    (group / "memory.stat").write_text(f"{word} {800 * MIB}\n")  # read a moment later
    assert free_host_memory(tmp_path) == 1000 * MIB


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
