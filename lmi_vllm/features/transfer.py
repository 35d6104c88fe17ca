"""What the features that fetch share: retries, locks, records, and watched progress.

Progress is measured on the disk rather than counted inside a client: the same few lines then serve
huggingface_hub, its xet transfer, s5cmd and boto3, and what is reported is what has arrived.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, TypeVar

from filelock import FileLock, Timeout

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import (
    DownloadProgress,
    InterruptedTransferError,
    ProgressSink,
    StoredObject,
)
from lmi_vllm.sources.local import MANIFEST_NAME

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.4
RATE_WINDOW_SECONDS = 10.0
RETRY_PAUSES_SECONDS: Final = (0.5, 2.0)
SLOW_SECONDS: Final = 10.0  # of a list or a small file
MOST_PATIENCE_SECONDS: Final = 300.0  # with what a source asks to wait (Retry-After)
_Result = TypeVar("_Result")


def is_weight_file(name: str) -> bool:
    """Whether `name` looks like model weights of any format."""
    return name.endswith((".safetensors", ".bin", ".pt", ".gguf", ".tensors"))


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


@contextmanager
def naming_what_is_slow(source: str, seconds: float = SLOW_SECONDS) -> Iterator[None]:
    """Log that `source` lets us wait, if the body takes longer: errors of clients come late."""
    text = "%s has not answered for %g s: still waiting"
    timer = threading.Timer(seconds, logger.warning, (text, source, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def file_lock(lock: Path, what: str, *, is_removed: bool = False) -> Iterator[None]:
    """Hold the file lock `lock` while the body runs; the system releases it if we are killed.

    It is removed while it is held: the library gives no lock on a file that is gone.

    Raises:
        OSError: the file cannot be made; the library would wait for it for ever.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(lock)
    try:
        held.acquire(timeout=0)
    except Timeout:
        lock.touch()
        logger.warning("Another process is fetching %s: waiting for it (%s)", what, lock)
        held.acquire()
    try:
        yield
    finally:
        if is_removed:
            lock.unlink(missing_ok=True)
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
            wait = max(pause, min(error.retry_after_seconds, MOST_PATIENCE_SECONDS))
            logger.warning(
                "Fetching %s was interrupted (%s): trying again in %g s", source, error, wait
            )
            time.sleep(wait)
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


@dataclass(frozen=True, slots=True)
class Measure:
    """How to measure a download: `current` returns files and bytes on the disk."""

    files_total: int
    bytes_total: int
    current: Callable[[], tuple[int, int]]


@contextmanager
def reporting(measure: Measure, sink: ProgressSink) -> Iterator[None]:
    """Report `measure` to `sink` while the block runs, and once more when it ends well."""
    done = threading.Event()
    meter = _Meter(measure)

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            sink(meter.read())

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    sink(meter.read())


class _Meter:
    """Turns measurements into progress with a rate over the last seconds."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._samples = deque([(time.monotonic(), measure.current()[1])])

    def read(self) -> DownloadProgress:
        """The present progress."""
        files, size = self._measure.current()
        now = time.monotonic()
        while len(self._samples) > 1 and now - self._samples[0][0] > RATE_WINDOW_SECONDS:
            self._samples.popleft()
        started, first = self._samples[0]
        self._samples.append((now, size))
        rate = max(0.0, (size - first) / max(now - started, 1e-6))
        left = max(0, self._measure.bytes_total - size)
        return DownloadProgress(
            files=files,
            files_total=self._measure.files_total,
            bytes=min(size, self._measure.bytes_total),
            bytes_total=self._measure.bytes_total,
            bytes_per_second=rate,
            seconds_left=left / rate if rate > 0 else None,
        )
