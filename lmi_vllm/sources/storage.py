"""Disk space, locks and retries: what every kind of download needs around its transfer."""

import errno
import fcntl
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from lmi_vllm.errors import DownloadError

logger = logging.getLogger(__name__)

RETRY_PAUSES_SECONDS: Final = (0.5, 2.0)
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")
_THOUSAND: Final = 1000
_Result = TypeVar("_Result")


class InterruptedTransferError(Exception):
    """A transfer broke in a way that trying again may cure; its text is safe to show."""


def human_size(size: float) -> str:
    """`size` bytes with a decimal unit, as disk makers and `df -H` count."""
    for power, unit in enumerate(_UNITS, start=1):
        scaled = size / 1000**power
        if 1 <= scaled < _THOUSAND:
            return f"{scaled:.1f} {unit}"
    return f"{size:.0f} bytes" if size < _THOUSAND else f"{size / 1000**5:.1f} PB"


def free_bytes(directory: Path) -> int:
    """Free bytes where `directory` is or will be."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(source: str, needed_bytes: int, directory: Path, advice: str) -> None:
    """Return only when `directory` has room for `needed_bytes`.

    Raises:
        DownloadError: it has not; the text names both numbers.
    """
    free = free_bytes(directory)
    if needed_bytes > free:
        raise DownloadError(
            f"{source} needs {human_size(needed_bytes)} more on disk, but only {human_size(free)} "
            f"are free at {directory}: free some space or {advice}"
        )


@contextmanager
def naming_full_disk(
    source: str, needed_bytes: int, directory: Path, advice: str
) -> Iterator[None]:
    """Turn "no space left on device" inside the block into an error that names both numbers."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DownloadError(
            f"the disk filled up while {source} was fetched: it needs {human_size(needed_bytes)}, "
            f"and {human_size(free_bytes(directory))} are left at {directory}: free some space or "
            f"{advice}"
        ) from error


@contextmanager
def exclusive(lock: Path, what: str) -> Iterator[int]:
    """Run the block while no other process holds `lock`; the system frees it if we are killed.

    The block gets the lock's descriptor, so that a child process can be made to hold it too.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Another process is fetching %s: waiting for it", what)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def with_retries(source: str, transfer: Callable[[], _Result]) -> _Result:
    """The result of `transfer`, tried again after each `InterruptedTransferError`.

    Raises:
        DownloadError: it was interrupted every time.
    """
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return transfer()
        except InterruptedTransferError as error:
            logger.warning("Fetching %s was interrupted (%s): trying again", source, error)
            time.sleep(pause)
    try:
        return transfer()
    except InterruptedTransferError as error:
        attempts = len(RETRY_PAUSES_SECONDS) + 1
        raise DownloadError(
            f"fetching {source} was interrupted {attempts} times, last: {error}. Check the network "
            "and start again: what has arrived is kept"
        ) from error


def put_in_place(ready: Path, target: Path) -> None:
    """Rename the directory `ready` to `target`; an earlier version makes room only now."""
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    ready.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def without_secrets(text: str) -> str:
    """The first line of `text` without the query and the user part of URLs, which may be signed."""
    line = text.strip().split("\n", 1)[0]
    line = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1?***", line)
    return re.sub(r"(https?://)[^\s/@'\"]+@", r"\1***@", line)
