"""The temporary sibling of a download: prepared from what is there, filled, verified.

Beside the files lies a record of what the store held, so that a change is noticed later.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lmi_vllm.features.transfer import (
    FetchManifest,
    Measure,
    has_size,
    link_or_copy,
    read_manifest,
    reporting,
    with_retries,
    written_size,
)
from lmi_vllm.sources.base import InterruptedTransferError, ObjectStore, ProgressSink, StoredObject
from lmi_vllm.sources.disk import SPACE_ADVICE, reporting_full_disk, require_space
from lmi_vllm.sources.local import MANIFEST_NAME


@dataclass(frozen=True, slots=True)
class PartialDirectory:
    """The sibling directory in which a download for `target` is completed."""

    store: ObjectStore
    target: Path
    objects: tuple[StoredObject, ...]

    @property
    def directory(self) -> Path:
        """The path of the sibling: `<target>.partial`."""
        return self.target.with_name(f"{self.target.name}.partial")

    def prepare(self) -> None:
        """Keep complete files of an interrupted fetch; link unchanged ones of the old version."""
        self.directory.mkdir(parents=True, exist_ok=True)
        wanted = FetchManifest.of(self.store.url, self.objects)
        self._drop_outdated(read_manifest(self.directory), wanted)
        wanted.write(self.directory)
        for stored in self.objects:
            (self.directory / stored.name).parent.mkdir(parents=True, exist_ok=True)
        self._link_unchanged(read_manifest(self.target), wanted)

    def fill(self, on_progress: ProgressSink) -> None:
        """Fetch what is missing and verify all of it.

        Raises:
            DownloadError: the disk is too small, the store refused, or retries were used up.
        """
        needed = sum(stored.size for stored in self._missing())
        require_space(self.store.url, needed, self.directory, SPACE_ADVICE)

        def transfer(attempt: int) -> None:
            missing = self._missing()
            if missing:
                self.store.download(missing, self.directory, attempt)
            self._verify(missing)

        total = sum(stored.size for stored in self.objects)
        measure = Measure(len(self.objects), total, self._arrived)
        with reporting(measure, on_progress), self.reporting_full_disk():
            with_retries(self.store.url, transfer)

    def reporting_full_disk(self) -> AbstractContextManager[None]:
        """Return a context that turns a full disk into an error with the needed and free bytes."""
        total = sum(stored.size for stored in self.objects)
        return reporting_full_disk(self.store.url, total, self.directory, SPACE_ADVICE)

    def _missing(self) -> list[StoredObject]:
        return [
            stored
            for stored in self.objects
            if not has_size(self.directory / stored.name, stored.size)
        ]

    def _drop_outdated(self, earlier: FetchManifest | None, wanted: FetchManifest) -> None:
        """Delete files of another version, and the temporary files of a killed transfer."""
        known = earlier.objects if earlier else {}
        for path in _files_in(self.directory):
            name = str(path.relative_to(self.directory))
            expected = wanted.objects.get(name)
            if expected is None or known.get(name) != expected or not has_size(path, expected[0]):
                path.unlink()

    def _link_unchanged(self, current: FetchManifest | None, wanted: FetchManifest) -> None:
        """Link or copy the files of the present version that the new one has unchanged."""
        for name, expected in wanted.objects.items():
            present, path = self.target / name, self.directory / name
            unchanged = current is not None and current.objects.get(name) == expected
            if unchanged and has_size(present, expected[0]) and not path.exists():
                link_or_copy(present, path)

    def _arrived(self) -> tuple[int, int]:
        done = len(self.objects) - len(self._missing())
        return done, sum(written_size(path) for path in _files_in(self.directory))

    def _verify(self, fetched: Sequence[StoredObject]) -> None:
        """Check the size of every file, and its checksum where the store has one.

        Raises:
            InterruptedTransferError: a file is short, or had another checksum and was deleted.
        """
        if short := self._missing():
            raise InterruptedTransferError(f"{short[0].name} did not arrive whole")
        paths = [self.directory / stored.name for stored in fetched]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            intact = list(pool.map(self.store.is_intact, fetched, paths))
        for path, is_intact in zip(paths, intact, strict=True):
            if not is_intact:
                path.unlink()
                raise InterruptedTransferError(f"{path.name} arrived with another checksum")


def _files_in(directory: Path) -> list[Path]:
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(MANIFEST_NAME)
    ]
