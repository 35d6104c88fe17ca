"""Folders with a name that every user knows are used only where no other user can change them."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from lmi_vllm.checks.compiled_code import compiled_code_exports, compiled_code_folder
from lmi_vllm.errors import StartupError
from lmi_vllm.sources.storage import cache_directory
from lmi_vllm.sources.trusted_folders import (
    per_user_sibling,
    trusted_folder,
    untrusted_folder_reason,
)

STRANGER = 12345
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that every user may write, as /tmp is."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def of_stranger(folder: Path) -> Path:
    """Make a folder that another user owns."""
    folder.mkdir(parents=True)
    os.chown(folder, STRANGER, STRANGER)
    return folder


def test_torch_and_triton_get_folders_of_this_user(tmp_path: Path, scratch: Path) -> None:
    """Mode 700, below vLLM's own cache, and the same at the next start."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    found = compiled_code_exports(environ)
    assert found == {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "home/vllm/lmi_vllm/inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "home/vllm/lmi_vllm/triton"),
    }
    for folder in found.values():
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    assert compiled_code_exports(environ) == found
    assert not list(scratch.iterdir())


def test_what_the_user_has_set_stays(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of his that others can change is used, with a warning that names the variable."""
    inductor, triton = of_stranger(tmp_path / "shared"), tmp_path / "own"
    environ = {
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(inductor),
        "TRITON_CACHE_DIR": str(triton),
    }
    assert compiled_code_exports(environ) == {}
    (warning,) = caplog.messages
    assert f"TORCHINDUCTOR_CACHE_DIR={inductor}" in warning
    assert f"user {STRANGER}" in warning
    assert not list(scratch.iterdir())


def test_a_cache_that_others_can_change_is_left(
    tmp_path: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A home of another user: all caches move below the temporary directory, by a stable name."""
    of_stranger(tmp_path / "home")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "home")}
    root = scratch / f"lmi-vllm-cache-{os.geteuid()}"
    found = compiled_code_exports(environ)
    assert found == {
        "VLLM_CACHE_ROOT": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(root / "lmi_vllm/inductor"),
        "TRITON_CACHE_DIR": str(root / "lmi_vllm/triton"),
    }
    assert "VLLM_CACHE_ROOT chooses another" in caplog.text
    assert compiled_code_exports(environ) == found
    assert compiled_code_folder(environ) == root  # where the compile cache keeps its entries


def test_without_a_safe_folder_the_start_ends(tmp_path: Path, scratch: Path) -> None:
    """The text names both folders and the variable."""
    of_stranger(tmp_path / "home")
    taken = of_stranger(scratch / f"lmi-vllm-cache-{os.geteuid()}")
    with pytest.raises(StartupError, match="set VLLM_CACHE_ROOT") as refused:
        compiled_code_exports({"XDG_CACHE_HOME": str(tmp_path / "home")})
    assert str(taken) in refused.value.text


def test_a_link_of_another_user_is_not_followed(scratch: Path, tmp_path: Path) -> None:
    """It leads to a folder of ours, which its owner has chosen."""
    own = tmp_path / "own"
    own.mkdir()
    link = scratch / "cache"
    link.symlink_to(own)
    assert untrusted_folder_reason(link, "code") == ""
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert "is a link" in untrusted_folder_reason(link, "code")


def test_a_folder_that_everybody_may_write_is_left(scratch: Path) -> None:
    """Files in it could be replaced before they are read."""
    usual = scratch / "usual"
    usual.mkdir()
    usual.chmod(0o777)
    own = per_user_sibling(usual)
    assert trusted_folder(usual, own, "code", "SETTING") == own
    usual.chmod(0o755)
    assert trusted_folder(usual, per_user_sibling(usual), "code", "SETTING") == usual


def test_fetched_files_leave_a_folder_of_another_user(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home that can be written, files lie below the temporary directory."""
    monkeypatch.setenv("HOME", "/proc/nowhere")
    monkeypatch.setattr(os, "access", lambda path, _: not str(path).startswith("/proc"))
    assert cache_directory("s3://x/y", {}).is_relative_to(scratch / ".djl.ai")
    os.chown(scratch / ".djl.ai", STRANGER, STRANGER)
    own = scratch / f".djl.ai-{os.geteuid()}"
    assert cache_directory("s3://x/y", {}).is_relative_to(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
