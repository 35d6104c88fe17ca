"""Disk space, directories, manifests, locks and retries for every download."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

from filelock import FileLock, Timeout

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import InterruptedTransferError, StoredObject
from lmi_vllm.sources.progress import human_size
from lmi_vllm.sources.trusted_folders import per_user_sibling, trusted_folder

logger = logging.getLogger(__name__)

MANIFEST_NAME: Final = ".lmi-fetch.json"  # the manifest, in the directory itself
RETRY_PAUSES_SECONDS: Final = (0.5, 2.0)
_Result = TypeVar("_Result")


def cache_directory(url: str, environ: Mapping[str, str]) -> Path:
    """The cache folder for `url`: `<root>/download/<hash>`, as in the LMI container.

    Raises:
        StartupError: only the temporary directory can be written, and other users can change it.
    """
    # An archive is unpacked here before settings exist: its serving.properties is part of them.
    root = environ.get("SERVING_DOWNLOAD_DIR") or environ.get("DJL_CACHE_DIR")
    if not root:
        home = Path("~/.djl.ai").expanduser()
        usable = home if home.is_dir() else home.parent
        root = str(home if os.access(usable, os.W_OK) else _temporary_root())
    digest = hashlib.sha256(url.strip().encode()).hexdigest()[:40]
    return Path(root).expanduser().absolute() / "download" / digest


def _temporary_root() -> Path:
    """The folder below the temporary directory; another user may have created its name first."""
    usual = Path(tempfile.gettempdir()) / ".djl.ai"
    return trusted_folder(usual, per_user_sibling(usual), "what is fetched", "SERVING_DOWNLOAD_DIR")


def skip_single_folders(directory: Path) -> Path:
    """`directory`, or the directory below, as long as it is an only child."""
    children = [child for child in directory.iterdir() if child.name != MANIFEST_NAME]
    if len(children) == 1 and children[0].is_dir():
        return skip_single_folders(children[0])
    return directory


def has_size(path: Path, size: int) -> bool:
    """Whether `path` is a file of `size` bytes."""
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """The fetched objects (`objects`: name -> size and ETag) and their files with sizes."""

    source: str
    objects: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, objects: Sequence[StoredObject]) -> Self:
        """The manifest of a directory whose files are the `objects`."""
        return cls(
            source,
            {stored.name: (stored.size, stored.etag) for stored in objects},
            {stored.name: stored.size for stored in objects},
        )

    def write(self, directory: Path) -> None:
        """Save it in `directory`, whole or not at all."""
        record = {"source": self.source, "objects": self.objects, "files": self.files}
        temporary = directory / f"{MANIFEST_NAME}.new"
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(directory / MANIFEST_NAME)

    def is_on_disk(self, directory: Path) -> bool:
        """Whether every file is in `directory` with its size."""
        return all(has_size(directory / name, size) for name, size in self.files.items())


def read_manifest(directory: Path) -> FetchManifest | None:
    """The manifest in `directory`; None if there is none that can be read."""
    try:
        record = json.loads((directory / MANIFEST_NAME).read_bytes())
        objects = {name: (int(size), str(etag)) for name, (size, etag) in record["objects"].items()}
        return FetchManifest(str(record["source"]), objects, dict(record["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def written_size(path: Path) -> int:
    """Bytes of `path` on the disk: parts arrive in any order, with holes between."""
    try:
        status = path.stat()
    except FileNotFoundError:  # renamed meanwhile
        return 0
    return min(status.st_size, status.st_blocks * 512)


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


@contextmanager
def file_lock(lock: Path, what: str) -> Iterator[None]:
    """Hold the file lock `lock` while the body runs; the system releases it if we are killed."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        logger.info("Another process is fetching %s: waiting for it", what)
        held.acquire()
    try:
        yield
    finally:
        held.release()


def with_retries(source: str, transfer: Callable[[int], _Result]) -> _Result:
    """The result of `transfer`, retried after each `InterruptedTransferError`.

    It gets the number of the attempt, from 0.

    Raises:
        DownloadError: it was interrupted every time.
    """
    for attempt, pause in enumerate((*RETRY_PAUSES_SECONDS, None)):
        try:
            return transfer(attempt)
        except InterruptedTransferError as error:
            if pause is None:
                raise DownloadError(
                    f"fetching {source} was interrupted {attempt + 1} times, last: {error}. Check "
                    "the network and start again: what has arrived is kept"
                ) from error
            logger.warning("Fetching %s was interrupted (%s): trying again", source, error)
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def link_or_copy(present: str | Path, path: str | Path) -> None:
    """Make `path` the file `present`, with links followed; without copying if possible."""
    try:
        os.link(os.path.realpath(present), path)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(present, path)


def replace_directory(ready: Path, target: Path) -> None:
    """Rename the directory `ready` to `target`, replacing an earlier version at the last moment."""
    old = target.with_name(f"{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    ready.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def without_secrets(text: str) -> str:
    """The first line of `text` without queries and users of URLs, which may be secret."""
    line = text.strip().split("\n", 1)[0]
    line = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1?***", line)
    return re.sub(r"(https?://)[^\s/@'\"]+@", r"\1***@", line)
