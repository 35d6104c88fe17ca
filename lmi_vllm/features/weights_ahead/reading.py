"""Reads files into the page cache, ahead of an engine that will read them.

Plain reads into one buffer: who reads a page into memory has to touch it, too, or the engine waits
for that where the machine is a virtual one (DECISIONS.md 182).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.sources.disk import human_size

logger = logging.getLogger(__name__)

BLOCK: Final = 64 << 20  # bytes between two looks at memory and at the engine
BUFFER: Final = 8 << 20  # bytes
LOOKS: Final = 64  # at whether a block is in memory; the kernel itself reads less ahead than one
_OVERTAKEN: Final = "the engine needs no more"
_READ_BYTES: Final = "read_bytes:"


class ReadAhead:
    """One reading of files. At most half of the free memory is filled: the start needs the other.

    It ends early once a quarter is left, because of whatever else takes some. `is_wanted` says of a
    file's place whether the engine has still to read it. Where the kernel does not tell whether a
    file system keeps in memory what was read, `is_known_to_keep` does.
    """

    def __init__(
        self,
        files: Sequence[Path],
        is_wanted: Callable[[int], bool],
        free_memory: Callable[[], int | None],
        *,
        is_known_to_keep: bool = True,
    ) -> None:
        self._files = files
        self._is_wanted = is_wanted
        self._free_memory = free_memory
        self._free_first = free_memory() or 0
        self._is_known_to_keep = is_known_to_keep
        self.passed = 0  # bytes that were asked for, those in memory included
        self._disk_before: int | None = None
        self._end = ""  # why some were not

    def run(self) -> None:
        """Read the files, and log what came of it."""
        began, self._disk_before = time.monotonic(), _bytes_read_here()
        try:
            buffer = memoryview(bytearray(BUFFER))
            for place, path in enumerate(self._files):
                self._read(place, path, buffer)
        except OSError as error:
            self._end = f"{error.strerror or error}"
        self._log(time.monotonic() - began)

    @property
    def count(self) -> int:
        """Bytes that were not in memory before."""
        before, now = self._disk_before, _bytes_read_here()
        return self.passed if before is None or now is None else now - before

    def _read(self, place: int, path: Path, buffer: memoryview) -> None:
        if not self._goes_on(place):
            return
        with path.open("rb", buffering=0) as file:
            source, size = file.fileno(), os.fstat(file.fileno()).st_size
            for start in range(0, size, BLOCK):
                if not self._goes_on(place):
                    return
                count = min(BLOCK, size - start)
                is_there = _is_there(source, start, count)
                self.passed += count if is_there else _into_cache(source, buffer, start, count)
                kept = _is_kept(source, start + count - 1)  # just now: earlier ones may be dropped
                if not (self._is_known_to_keep if kept is None else kept):
                    self._end = "what was read does not stay in memory"

    def _goes_on(self, place: int) -> bool:
        if self._end == _OVERTAKEN or not self._end:
            self._end = "" if self._is_wanted(place) else _OVERTAKEN
        free = self._free_memory() or 0
        is_much = self.count + BLOCK > self._free_first // 2 or free < self._free_first // 4
        if not self._end and is_much:
            self._end = "more would take memory that the start needs"
        return not self._end

    def _log(self, seconds: float) -> None:
        count = self.count
        said = f"{human_size(count)} in {seconds:.1f} s" if count else "nothing"
        why = self._end or ("" if count else "they are in memory already")
        fields = {"bytes": count, "seconds": round(seconds, 3)}
        logger.info(
            "weights: read ahead %s%s",
            said,
            f" ({why})" if why else "",
            extra={"fields": {"read_ahead": fields}},
        )


def _into_cache(source: int, buffer: memoryview, start: int, count: int) -> int:
    """Read a part of a file over what the buffer has; return its bytes."""
    done = 0
    while done < count and (
        read := os.preadv(source, [buffer[: min(len(buffer), count - done)]], start + done)
    ):
        done += read
    return done


def _is_there(source: int, start: int, count: int) -> bool:
    """Whether a part of a file is in memory, as far as some of its bytes show.

    cachestat(2) would tell of all of them, but takes files of an overlay, as an image's are, for
    absent; mincore(2) takes those of another user for present.
    """
    return all(_is_kept(source, at) for at in range(start, start + count, BLOCK // LOOKS))


def _is_kept(source: int, place: int = 0) -> bool | None:
    """Whether a byte of a file is in memory; None where the kernel does not tell."""
    try:
        os.preadv(source, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _bytes_read_here() -> int | None:
    """Return the bytes that the disk has read for this thread; None where it is not counted."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/thread-self/io").read_text(encoding="ascii").splitlines():
            if line.startswith(_READ_BYTES):
                return int(line.removeprefix(_READ_BYTES))
    return None
