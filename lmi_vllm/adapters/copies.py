"""The copies that were fetched or unpacked for adapters: each goes with its last adapter.

Other servers on the machine may use the same folder. For every source that it uses, each of them
locks one byte of a common file. Only the last one deletes the copy.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lmi_vllm.sources.local import cache_directory

logger = logging.getLogger(__name__)

LOCK_FILE: Final = "adapters-in-use.lock"


class FetchedCopies:
    """Counts the adapters of each source. Safe to use from several threads; calls may block."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._lock = threading.Lock()
        self._uses: Counter[str] = Counter()
        self._folders: dict[str, Path] = {}
        self._file: int | None = None

    def hold(self, source: str) -> None:
        """Keep what is fetched from this source; called before it is fetched."""
        with self._lock:
            self._uses[source] += 1
            if self._uses[source] == 1:
                self._locked(source, fcntl.LOCK_SH)

    def found(self, source: str, path: Path) -> None:
        """Remember where the copy lies: in a folder of our cache, or in another program's."""
        download = cache_directory("", self._environ).parent
        if path.is_relative_to(download) and path != download:
            with self._lock:
                self._folders[source] = download / path.relative_to(download).parts[0]

    def release(self, source: str) -> None:
        """Delete the copy, unless another adapter or another server uses it."""
        with self._lock:
            self._uses[source] -= 1
            if self._uses[source] > 0:
                return
            del self._uses[source]
            folder = self._folders.pop(source, None)
            is_last = self._locked(source, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dropped = folder.with_name(f"{folder.name}.dropped") if folder is not None else None
            if folder is not None and dropped is not None and is_last:
                shutil.rmtree(dropped, ignore_errors=True)
                try:
                    folder.rename(dropped)
                except OSError as error:
                    logger.debug("the copy %s cannot be dropped: %s", folder, error)
            self._locked(source, fcntl.LOCK_UN)
        if dropped is not None:
            shutil.rmtree(dropped, ignore_errors=True)

    def _locked(self, source: str, kind: int) -> bool:
        """Lock this source's byte, which others have alone for moments; whether it was possible."""
        byte = int(hashlib.sha256(source.encode()).hexdigest()[:15], 16)
        try:
            if self._file is None:
                path = cache_directory("", self._environ).parent / LOCK_FILE
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._file, kind, 1, byte)
        except OSError as error:  # another server's, or a file system without locks
            logger.debug("%s is not locked: %s", source, error)
            return False
        return True
