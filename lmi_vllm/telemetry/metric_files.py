"""The files in which several processes keep their metrics: their room on the disk is taken at once.

prometheus_client maps files with holes. Where the disk is full, the kernel ends a process that
writes into a hole (SIGBUS), and nothing says why. Without room a process keeps its values in
memory, where no other process adds them up: an error here would end vLLM's output handler.
"""

import logging
import os
from pathlib import Path
from typing import BinaryIO, Final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger(__name__)

_BYTES: Final = 512 * 1024  # of each file: about 1500 series
_AROUND_A_KEY: Final = 64  # bytes of a value, its length and its padding, and some to spare


class WholeFile(MmapedDict):
    """A file of metrics without holes, or memory in its place."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        self._is_memory = not read_mode and not _has_room(Path(filename), _BYTES)
        if not self._is_memory:
            super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]
            return
        Path(filename).unlink(missing_ok=True)  # readers expect a whole one
        with _memory() as memory:
            super().__init__(f"/proc/self/fd/{memory.fileno()}")  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        grows = self._used + len(key.encode()) + _AROUND_A_KEY > self._capacity
        if grows and not self._is_memory and not _has_room(Path(self._fname), 2 * self._capacity):
            self._is_memory, memory = True, _memory()
            memory.write(self._m[:])
            memory.flush()
            self._f.close()
            self._f = memory
        super()._init_value(key)  # type: ignore[no-untyped-call]


def take_room() -> None:
    """Let the metrics that are made from now on keep their values in such files, if in files."""
    values.MmapedDict = WholeFile  # type: ignore[attr-defined]


def _has_room(file: Path, size: int) -> bool:
    try:
        with file.open("ab") as opened:
            os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        logger.warning(
            "%s has no room (%s): /metrics lacks values of this process; free some space, or let "
            "TMPDIR name another disk, and start again",
            file,
            error.strerror,
        )
        return False
    return True


def _memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("lmi-vllm-metrics"), "r+b")
