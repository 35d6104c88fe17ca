"""Checks of owner and mode: code is loaded only from folders of root or this user."""

import contextlib
import functools
import grp
import logging
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from lmi_vllm.errors import StartupError

logger = logging.getLogger(__name__)

MAX_ENTRIES: Final = 10_000  # number of files examined in a folder


def untrusted_reason(
    places: Iterable[Path], above: Iterable[Path], what: str, owned: Iterable[Path] | None = None
) -> str:
    """Return why other users can change one of `places`; empty if they cannot.

    `above` are their parent folders, which may be world-writable with the sticky bit, as /tmp is.
    The owner of `owned`, or else of `places`, has to be root or this process's user.
    """
    places = tuple(places)
    for place in (*places, *above):
        mode = place.lstat().st_mode
        if stat.S_ISLNK(mode):
            return f"{place} is a link"
        is_scratch = place not in places and mode & stat.S_ISVTX
        if mode & stat.S_IWOTH and not is_scratch:
            return (
                f"{place} is world-writable (mode {stat.S_IMODE(mode):04o}), which is not safe for "
                f"{what}: chmod o-w {place}"
            )
        if mode & stat.S_IWGRP and not is_scratch and (others := _others_of(place.lstat().st_gid)):
            return (
                f"{place} may be written by the group of user {min(others)} (mode "
                f"{stat.S_IMODE(mode):04o}), which is not safe for {what}: chmod g-w {place}"
            )
    for place in places if owned is None else owned:
        owner = place.lstat().st_uid
        if owner not in (0, os.geteuid()):
            return (
                f"{place} belongs to user {owner}, and this server is user {os.geteuid()}: "
                f"{what} must belong to root or to that user"
            )
    return ""


@functools.cache
def _others_of(group: int) -> frozenset[str]:
    """Return the users of a group besides root and this process's user.

    A user's own private group has none. Neither has a group that is only a number, as for volumes
    of containers.
    """
    own = {"root"}
    users = {user.pw_name for user in pwd.getpwall() if user.pw_gid == group and user.pw_uid}
    with contextlib.suppress(KeyError):  # this user is only a number
        own.add(pwd.getpwuid(os.geteuid()).pw_name)
    with contextlib.suppress(KeyError):  # the group is
        users |= set(grp.getgrgid(group).gr_mem)
    return frozenset(users - own)


def untrusted_code_reason(folder: Path, what: str) -> str:
    """Return why Python files in `folder` must not run; empty if they may.

    Parent folders count, too: their owners could replace the folder.
    """
    real = folder.resolve()
    try:
        inside = tuple(_entries(real))
        return untrusted_reason((real, *inside), real.parents, what, (real, *inside, *real.parents))
    except (OSError, ValueError) as error:
        return f"{folder} cannot be looked through: {error}"


def _entries(folder: Path) -> Iterator[Path]:
    for count, path in enumerate(folder.rglob("*") if folder.is_dir() else ()):
        if count >= MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES} entries")
        yield path


def untrusted_folder_reason(folder: Path, what: str) -> str:
    """Return why `folder` is not safe for `what`; it is created for this user if missing."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (folder, *folder.parents):
            # The owner of a link chooses the folder, which may be one of ours.
            if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid()):
                return f"{path} is a link that belongs to user {path.lstat().st_uid}"
        real = folder.resolve()
        if not os.access(real, os.W_OK | os.X_OK):
            return f"{real} cannot be written"
        return untrusted_reason((real,), real.parents, what, (real, *real.parents))
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror or error}"


def trusted_folder(usual: Path, other: Path, what: str, setting: str) -> Path:
    """Return `usual`, or `other` with a warning if others can change it; created if missing.

    Raises:
        StartupError: others can change both; the text names the setting that chooses a third.
    """
    reason = untrusted_folder_reason(usual, what)
    if not reason:
        return usual
    if other_reason := untrusted_folder_reason(other, what):
        raise StartupError(
            f"there is no safe folder for {what}: {reason}; {other_reason}: set {setting} to a "
            "folder that is only yours"
        )
    logger.warning("%s: %s is used for %s; %s chooses another", reason, other, what, setting)
    return other


def per_user_sibling(folder: Path) -> Path:
    """Return `folder` with the user id added to its name, for where another user owns `folder`."""
    return folder.with_name(f"{folder.name}-{os.geteuid()}")
