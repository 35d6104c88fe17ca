"""Temporary folders that end with their process; the next start removes those of a killed one."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

SHARED_MEMORY: Final = Path("/dev/shm")
LONGEST_FOR_SOCKETS: Final = 70  # bytes: a socket's path has at most 107, vLLM's names have 36
_LOCK_NAME: Final = ".lock"
_OUTSIDE: Final = ".outside"  # the file with the names of files that go with the folder
_OURS: Final = "lmi-vllm-"  # beginning of the names of our folders for temporary files


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder of this process; while its lock is held, no other process removes it."""

    path: Path
    lock: IO[bytes]
    notes: "PrivateFolder | None" = None  # where files elsewhere are noted, if not here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def note_outside(self, files: Iterable[str]) -> None:
        """Note files elsewhere that are removed with the folder, if they are there still."""
        folder = self.path if self.notes is None else self.notes.path
        (folder / _OUTSIDE).write_text("\n".join(files), encoding="utf-8")

    @property
    def for_sockets(self) -> Path | None:
        """Where sockets can be: here, or beside the notes if the path is too long; else nowhere."""
        if len(os.fsencode(self.path)) <= LONGEST_FOR_SOCKETS:
            return self.path
        return None if self.notes is None else self.notes.path

    def remove(self) -> None:
        """Remove the folder with all of it, then release the lock; may be called twice."""
        if self.notes is not None:
            self.notes.remove()
        _remove(self.path)
        self.lock.close()


def new_private_folder(
    prefix: str, root: Path | None = None, notes_in: Path | None = None
) -> PrivateFolder:
    """Return a new folder in `root`, after removing those that killed servers have left there.

    In the folder of temporary files, which is the default, all of ours are looked at: a server with
    other settings makes none of the same prefix. Files in `notes_in` are noted in a folder there:
    a container that is started again may have that place still, and its temporary files no more.
    """
    notes = None
    if notes_in is not None:
        with contextlib.suppress(OSError):  # not there, or full: they are noted in the folder
            notes = new_private_folder(prefix, notes_in)
    left = f"{prefix}*" if root is not None else f"{_OURS}*"
    root = Path(tempfile.gettempdir()) if root is None else root
    for folder in root.glob(left):
        _remove_if_left(folder)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    made = path / f"{_LOCK_NAME}-made"  # another process takes a free lock for one that was left
    lock = made.open("wb")
    with contextlib.suppress(OSError):  # a file system without locks, where none is removed
        fcntl.flock(lock, fcntl.LOCK_EX)
    made.rename(path / _LOCK_NAME)
    return PrivateFolder(path, lock, notes)


def remove_held() -> None:
    """Remove the folders of temporary files that this process still has, as its last act (Linux).

    Their files are open until then, so no list of them is needed. Other processes of the server
    have ended.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            lock = descriptor.readlink()
            if lock.name == _LOCK_NAME and lock.parent.name.startswith(_OURS):
                _remove(lock.parent)


def _remove(folder: Path) -> None:
    """Remove a folder that no process needs any more, and the files that it has noted."""
    with contextlib.suppress(FileNotFoundError):
        for name in (folder / _OUTSIDE).read_text(encoding="utf-8").splitlines():
            Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose lock is free; a folder that is being made has no lock file yet.

    Any user can create such a name, so links, pipes and files of other users are left alone.
    """
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            return
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        with os.fdopen(os.open(folder / _LOCK_NAME, flags), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
