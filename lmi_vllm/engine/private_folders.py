"""Temporary folders that go with their process, also with one that is killed: at the next start."""

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
    """A folder of this process; it is never removed while its lock is held."""

    path: Path
    lock: IO[bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all in it, then let go of the lock; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def new_private_folder(prefix: str) -> PrivateFolder:
    """Return a new folder, after removing those of this prefix that killed servers left behind."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{prefix}*"):
        _remove_if_left(folder)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    lock = (path / _LOCK_NAME).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return PrivateFolder(path, lock)


def _remove_if_left(folder: Path) -> None:
    """Remove a folder whose lock is free; one that is just being made has none yet.

    Any user can make such a name: what is not ours, a link or a pipe is not waited for or followed.
    """
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode):
            return
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        with os.fdopen(os.open(folder / _LOCK_NAME, flags), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
