"""Limits of the platform are raised where possible and named where too small."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lmi_vllm.checks.platform import (
    check_cache_folders,
    check_shared_memory,
    check_temporary_folder,
)

PROGRAM = """
import resource, sys
from lmi_vllm.checks.platform import raise_open_files
soft, hard, queue = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(raise_open_files(queue))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(soft: int, hard: int, queue: int) -> list[str]:
    """Return what a process with these real limits says, and its limit afterwards."""
    words = [str(number) for number in (soft, hard, queue)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_open_files_are_raised_to_the_hard_bound() -> None:
    """No warning where the hard bound is enough."""
    assert limited(256, 2000, 1000) == ["[]", "2000"]


def test_open_files_too_few_are_named() -> None:
    """The warning has the limit, the setting, and what to do."""
    said, limit = limited(256, 512, 1000)
    assert "limit of open files is 512; job_queue_size=1000 needs about 1256" in said
    assert limit == "512"


def test_shared_memory_too_small_is_named(tmp_path: Path) -> None:
    """Only several processes need it, and only too little of it is a warning."""
    assert check_shared_memory(1, tmp_path) == []
    assert check_shared_memory(2, tmp_path / "none") == []
    assert "wants" in check_shared_memory(1 << 40, tmp_path)[0]


def test_cache_folders_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    """Folders that are missing are fine where they can be made; each one that cannot is named."""
    assert check_cache_folders({"XDG_CACHE_HOME": str(tmp_path)}) == []
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    (warning,) = check_cache_folders({"XDG_CACHE_HOME": str(tmp_path), "HF_HOME": f"{blocked}/hf"})
    assert f"{blocked}/hf cannot be written" in warning
    assert "set HF_HOME" in warning
    assert len(check_cache_folders({"XDG_CACHE_HOME": str(blocked)})) == 2


def test_temporary_folder_that_is_not_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python passes over one that is full, and takes /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert check_temporary_folder({}) == []
    assert check_temporary_folder({"TMPDIR": f"{tmp_path}/"}) == []
    (warning,) = check_temporary_folder({"TMPDIR": "/scratch"})
    assert "TMPDIR=/scratch cannot be written" in warning
    assert str(tmp_path) in warning
