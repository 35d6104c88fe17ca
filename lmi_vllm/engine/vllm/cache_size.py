"""The size of the KV cache on a CPU, which a worker tells the server for its errors.

It may be less than what the server has asked for, and only the worker knows what was free.
"""

import contextlib
from pathlib import Path
from typing import Final, NamedTuple, Self

from lmi_vllm.engine.vllm.processes import own_error_file

_NAME: Final = "kv-cache-bytes"  # beside the file of the engine's errors


class CacheSize(NamedTuple):
    """Bytes of a worker's KV cache, and bytes that were free for it."""

    size: int
    free: int

    @classmethod
    def read(cls, error_file: Path) -> Self | None:
        """Return what a worker of the engine has noted; None if none has come so far."""
        with contextlib.suppress(OSError, ValueError):
            size, free = error_file.with_name(_NAME).read_text(encoding="ascii").split()
            return cls(int(size), int(free))
        return None

    def note(self) -> None:
        """Tell the server; a failure to write must not end the engine."""
        if (error_file := own_error_file()) is not None:
            with contextlib.suppress(OSError):
                text = f"{self.size} {self.free}\n"
                error_file.with_name(_NAME).write_text(text, encoding="ascii")
