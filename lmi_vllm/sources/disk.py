"""Disk space: what is free, and errors with numbers where it is not enough."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError

SPACE_ADVICE: Final = "choose a larger disk (SERVING_DOWNLOAD_DIR, or --to of fetch)"
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")
_THOUSAND: Final = 1000


def human_size(size: float) -> str:
    """`size` bytes with a decimal unit, as `df -H` prints them."""
    for power, unit in enumerate(_UNITS, start=1):
        scaled = size / 1000**power
        if 1 <= scaled < _THOUSAND:
            return f"{scaled:.1f} {unit}"
    return f"{size:.0f} bytes" if size < _THOUSAND else f"{size / 1000**5:.1f} PB"


def free_bytes(directory: Path) -> int:
    """Free bytes at `directory`, which may not exist yet."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(source: str, needed_bytes: int, directory: Path, advice: str) -> None:
    """Check that `directory` has room for `needed_bytes`.

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
def reporting_full_disk(
    source: str, needed_bytes: int, directory: Path, advice: str
) -> Iterator[None]:
    """Turn "no space left on device" in the body into an error with both numbers."""
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
