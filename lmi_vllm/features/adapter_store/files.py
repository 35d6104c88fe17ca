"""The folders of adapters that came from the store, in a folder locked by one process."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from lmi_vllm.features.metrics import ADAPTER_STORE_BYTES
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.local import cache_directory

logger = logging.getLogger(__name__)

SEPARATOR: Final = "@"  # between name and version; a name cannot contain it
_TEMPORARY_SUFFIXES: Final = (".partial", ".ready", ".old")


class AdapterFiles:
    """The size in bytes of each adapter by `<name>@<version>`, the least recently used first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.limits = Limits(0, max_bytes, "option.adapter_store_cache_gb")
        self._sizes: dict[str, int] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sizes))

    def scan(self) -> None:
        """Count the files of earlier processes, which are used again or evicted; blocks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        by_age = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in filter(Path.is_dir, by_age):
            if SEPARATOR not in path.name or path.name.endswith(_TEMPORARY_SUFFIXES):
                shutil.rmtree(path, ignore_errors=True)
            else:
                files = (file for file in path.rglob("*") if file.is_file())
                self.add(path.name, sum(file.stat().st_size for file in files))

    def path(self, key: str) -> Path:
        """Return the folder of an adapter's files, whether it exists or not."""
        return self.folder / key

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes are within the limit."""
        return sum(self._sizes.values()) + size <= self.limits.total_bytes

    def add(self, key: str, size: int) -> None:
        """Reserve `size` bytes for the adapter, as the most recently used."""
        self._sizes.pop(key, None)
        self._sizes[key] = size
        self._report()

    def touch(self, key: str) -> None:
        """Make it the most recently used."""
        if key in self._sizes:
            self._sizes[key] = self._sizes.pop(key)

    def mark_used(self, key: str) -> None:
        """Have a server that starts later count it as used now; blocks."""
        with suppress(OSError):  # it may be gone by now
            os.utime(self.path(key))

    def size(self, key: str) -> int:
        """Return the bytes of an adapter; 0 where it is not here."""
        return self._sizes.get(key, 0)

    def delete(self, key: str) -> None:
        """Delete the files; blocks."""
        path = self.path(key)
        for location in (
            path,
            *(path.with_name(path.name + ending) for ending in _TEMPORARY_SUFFIXES),
        ):
            shutil.rmtree(location, ignore_errors=True)
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Free what is reserved for the adapter."""
        self._sizes.pop(key, None)
        self._report()

    def _report(self) -> None:
        ADAPTER_STORE_BYTES.set(sum(self._sizes.values()))


@contextmanager
def locked_files(
    location: str, environ: Mapping[str, str], max_bytes: int
) -> Iterator[AdapterFiles]:
    """Lock and yield the first cache folder of this store that no other process holds."""
    root = cache_directory("", environ).parent.parent / "adapter_store"
    root /= hashlib.sha256(location.encode()).hexdigest()[:16]
    lock, number = _lock_first_free(root)
    try:
        files = AdapterFiles(root / str(number), max_bytes)
        files.scan()
        yield files
    finally:
        lock.release()


def _lock_first_free(root: Path) -> tuple[FileLock, int]:
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        lock = FileLock(root / f"{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            number += 1
        else:
            return lock, number
