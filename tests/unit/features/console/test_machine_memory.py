"""Memory is read from what Linux and the NVIDIA driver say; nothing is guessed."""

import os
from pathlib import Path

import pytest

from lmi_vllm.features.console.machine_memory import gpus_in_use, memory_in_use

PAGE = os.sysconf("SC_PAGE_SIZE")
SMI = """#!/bin/sh
echo "0, NVIDIA A10G, 1024, 23028, 37"
echo "1, NVIDIA A10G, 2048, 23028, [N/A]"
echo "2, broken"
"""


def write_process(proc: Path, pid: int, parent: int, pages: int, name: str = "python") -> None:
    """Write what /proc says of a process."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "statm").write_text(f"999 {pages} 1 1 0 1 0\n")
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine of 1000 KiB on which a server, its engine, a worker and a foreign process run."""
    proc = tmp_path / "proc"
    write_process(proc, 10, 1, 100)
    write_process(proc, 11, 10, 20, "engine) S 1 (x")
    write_process(proc, 12, 11, 3)
    write_process(proc, 99, 1, 7000)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n")
    return proc


@pytest.mark.usefixtures("proc")
def test_memory_counts_the_server_and_all_it_started(tmp_path: Path) -> None:
    """Grandchildren are the engine's; other people's processes are not."""
    found = memory_in_use(10, tmp_path)
    assert found == {
        "server": 100 * PAGE,
        "engine": 23 * PAGE,
        "total": 1000 << 10,
        "available": 400 << 10,
    }


@pytest.mark.usefixtures("proc")
def test_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    """A group's limit below the machine's memory is what counts; `max` is none; files are free."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("300000\n")
    (group / "memory.stat").write_text("inactive_file 100000\n")
    found = memory_in_use(10, tmp_path)
    assert (found["total"], found["available"]) == (500000, 300000)
    (group / "memory.max").write_text("max\n")
    assert memory_in_use(10, tmp_path)["total"] == 1000 << 10


def test_memory_is_unknown_without_proc(tmp_path: Path) -> None:
    """Elsewhere than on Linux nothing is said."""
    assert memory_in_use(10, tmp_path) == {}


def test_gpus_are_those_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi prints them; a row that cannot be read is left out."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    first, second = gpus_in_use()
    assert first == {
        "index": "0",
        "name": "NVIDIA A10G",
        "used": 1024 << 20,
        "total": 23028 << 20,
        "load": 37,
    }
    assert second["load"] is None
    assert [gpu["index"] for gpu in gpus_in_use("1")] == ["1"]
    assert len(gpus_in_use("GPU-5d1c")) == 2


def test_gpus_are_none_without_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool, no GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_in_use() == []
