"""Temporary folders that end with their process; the next start removes those of a killed one."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

_LOCK_NAME: Final = ".lock"


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """A folder of this process; while its lock is held, no other process removes it."""

    path: Path
    lock: IO[bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its content, then release the lock; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def new_private_folder(prefix: str) -> PrivateFolder:
    """Return a new folder, after removing those of this prefix that killed servers have left."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{prefix}*"):
        _remove_if_left(folder)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    lock = (path / _LOCK_NAME).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return PrivateFolder(path, lock)


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
            shutil.rmtree(folder, ignore_errors=True)
