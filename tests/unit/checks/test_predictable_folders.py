"""Folders with a name that every user knows are used only where no other user can change them."""

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from lmi_vllm.sources.local import cache_directory
from lmi_vllm.sources.trusted_folders import (
    per_user_sibling,
    trusted_folder,
    untrusted_folder_reason,
)
from tests.unit.conftest import OTHER_USER

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


def test_a_group_of_others_may_not_write(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A private group may, and one that only has a number, as a volume's in a container."""
    folder = scratch / "shared"
    folder.mkdir()
    folder.chmod(0o775)
    assert untrusted_folder_reason(folder, "code") == ""
    os.chown(folder, 0, OTHER_USER)
    assert untrusted_folder_reason(folder, "code") == ""
    group = next(user for user in pwd.getpwall() if user.pw_gid and user.pw_uid)
    os.chown(folder, 0, group.pw_gid)
    assert f"the group of user {group.pw_name}" in untrusted_folder_reason(folder, "code")
    folder.chmod(0o755)
    assert untrusted_folder_reason(folder, "code") == ""
    members = grp.struct_group(("staff", "x", OTHER_USER + 1, ["root", "member"]))
    monkeypatch.setattr(grp, "getgrgid", lambda _: members)
    folder.chmod(0o775)
    os.chown(folder, 0, OTHER_USER + 1)
    assert "the group of user member" in untrusted_folder_reason(folder, "code")


def test_a_group_counts_where_this_user_is_only_a_number(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that runs as a user without a name."""
    group = OTHER_USER + 2

    def no_name(_: int) -> object:
        raise KeyError

    members = grp.struct_group(("staff", "x", group, ["member"]))
    monkeypatch.setattr(grp, "getgrgid", lambda _: members)
    monkeypatch.setattr(pwd, "getpwuid", no_name)
    folder = scratch / "shared"
    folder.mkdir()
    os.chown(folder, 0, group)
    folder.chmod(0o775)
    assert "the group of user member" in untrusted_folder_reason(folder, "code")


def test_a_link_of_another_user_is_not_followed(scratch: Path, tmp_path: Path) -> None:
    """It leads to a folder of ours, which its owner has chosen."""
    own = tmp_path / "own"
    own.mkdir()
    link = scratch / "cache"
    link.symlink_to(own)
    assert untrusted_folder_reason(link, "code") == ""
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert "is a link" in untrusted_folder_reason(link, "code")


def test_world_writable_folder_is_not_used(scratch: Path) -> None:
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
    os.chown(scratch / ".djl.ai", OTHER_USER, OTHER_USER)
    own = scratch / f".djl.ai-{os.geteuid()}"
    assert cache_directory("s3://x/y", {}).is_relative_to(own)
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
