"""The files in which several processes keep their metrics: their room on the disk is taken at once.

prometheus_client maps files with holes. Where the disk is full, the kernel ends a process that
writes into a hole (SIGBUS), and nothing says why.
"""

import os
from pathlib import Path
from typing import Final

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

from lmi_vllm.errors import StartupError

_BYTES: Final = 512 * 1024  # of each file: about 1500 series
_AROUND_A_KEY: Final = 64  # bytes of a value, its length and its padding, and some to spare


class WholeFile(MmapedDict):
    """A file of metrics without holes; a full disk is an error that names it."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        if not read_mode:
            try:
                with Path(filename).open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, _BYTES)
            except OSError as error:
                raise StartupError(
                    f"{filename} cannot be written ({error.strerror}), which has the metrics of "
                    "LMI_FRONTEND_PROCESSES: free some space, or let TMPDIR name another disk"
                ) from error
        super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]

    def _init_value(self, key: str) -> None:
        if self._used + len(key.encode()) + _AROUND_A_KEY > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
        super()._init_value(key)  # type: ignore[no-untyped-call]


def take_room() -> None:
    """Let the metrics that are made from now on keep their values in such files, if in files."""
    values.MmapedDict = WholeFile  # type: ignore[attr-defined]
