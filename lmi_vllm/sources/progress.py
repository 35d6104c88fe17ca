"""Progress of a download, and the watcher that measures it.

Progress is measured on the disk and not inside a client. The same few lines serve huggingface_hub,
its xet transfer, s5cmd and boto3, and the progress is what has really arrived.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

POLL_SECONDS = 0.4
RATE_WINDOW_SECONDS = 10.0
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB")
_THOUSAND: Final = 1000


def human_size(size: float) -> str:
    """`size` bytes with a decimal unit, as `df -H` prints them."""
    for power, unit in enumerate(_UNITS, start=1):
        scaled = size / 1000**power
        if 1 <= scaled < _THOUSAND:
            return f"{scaled:.1f} {unit}"
    return f"{size:.0f} bytes" if size < _THOUSAND else f"{size / 1000**5:.1f} PB"


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """The state of one download; `seconds_left` is None until a rate is known."""

    files: int
    files_total: int
    bytes: int
    bytes_total: int
    bytes_per_second: float = 0.0
    seconds_left: float | None = None

    @property
    def text(self) -> str:
        """A line of text: files, bytes, rate and time left."""
        percent = 100 * self.bytes // self.bytes_total if self.bytes_total else 100
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{percent}% of {human_size(self.bytes_total)}, {self.files} of {self.files_total} "
            f"files, {human_size(self.bytes_per_second)}/s{left}"
        )


class ProgressSink(Protocol):
    """Receives progress a few times a second, from any thread; it must return quickly."""

    def __call__(self, progress: DownloadProgress, /) -> None:
        """Receive one progress."""
        ...


def ignore_progress(progress: DownloadProgress, /) -> None:
    """Drop `progress`, for callers that show none."""


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
