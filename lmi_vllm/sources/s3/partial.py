"""The temporary sibling of an S3 download: prepared from what is there, filled, verified."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lmi_vllm.sources.archives import SPACE_ADVICE
from lmi_vllm.sources.manifest import (
    MANIFEST_NAME,
    FetchManifest,
    has_size,
    manifest_of,
    read_manifest,
)
from lmi_vllm.sources.progress import Measure, ProgressSink, reporting
from lmi_vllm.sources.s3.store import (
    S3Location,
    StoredObject,
    request_payer,
    translating,
)
from lmi_vllm.sources.s3.transfer import TransferJob, choose_transfers
from lmi_vllm.sources.storage import (
    InterruptedTransferError,
    naming_full_disk,
    require_space,
    with_retries,
)

logger = logging.getLogger(__name__)

_MD5_HEX_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class PartialDirectory:
    """What is being fetched for `target`, kept in its sibling until it is complete."""

    location: S3Location
    target: Path
    objects: tuple[StoredObject, ...]
    environ: Mapping[str, str]
    client: Any  # boto3's
    lock_descriptor: int

    @property
    def directory(self) -> Path:
        """The sibling itself."""
        return self.target.with_name(f"{self.target.name}.partial")

    def prepare(self) -> None:
        """Keep what an interrupted fetch has completed, and what an older version shares."""
        self.directory.mkdir(parents=True, exist_ok=True)
        wanted = manifest_of(self.location.url, self.objects)
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
        require_space(self.location.url, needed, self.directory, SPACE_ADVICE)
        transfers = list(choose_transfers(self.environ))

        def attempt() -> None:
            transfer = transfers.pop(0) if len(transfers) > 1 else transfers[0]
            missing = self._missing()
            if missing:
                transfer(self._job(missing))
            self._verify(missing)

        total = sum(stored.size for stored in self.objects)
        measure = Measure(len(self.objects), total, self._arrived)
        with reporting(measure, on_progress), self.naming_full_disk():
            with_retries(self.location.url, attempt)

    def naming_full_disk(self) -> AbstractContextManager[None]:
        """Name both numbers if the disk fills up inside the block."""
        total = sum(stored.size for stored in self.objects)
        return naming_full_disk(self.location.url, total, self.directory, SPACE_ADVICE)

    def _job(self, missing: Sequence[StoredObject]) -> TransferJob:
        return TransferJob(
            location=self.location,
            objects=missing,
            directory=self.directory,
            environ=self.environ,
            client=self.client,
            lock_descriptor=self.lock_descriptor,
        )

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
        """Take over the files of the present version that the new one has too."""
        for name, expected in wanted.objects.items():
            present, path = self.target / name, self.directory / name
            unchanged = current is not None and current.objects.get(name) == expected
            if unchanged and has_size(present, expected[0]) and not path.exists():
                try:
                    os.link(present, path)
                except OSError:  # no hard links on this file system
                    shutil.copyfile(present, path)

    def _arrived(self) -> tuple[int, int]:
        done = len(self.objects) - len(self._missing())
        return done, sum(_written_size(path) for path in _files_in(self.directory))

    def _verify(self, fetched: Iterable[StoredObject]) -> None:
        """Return when every file has its size, and its MD5 where the ETag is one.

        Raises:
            InterruptedTransferError: one has not; it has been deleted.
        """
        if short := self._missing():
            raise InterruptedTransferError(f"{short[0].name} did not arrive whole")
        hashed = [stored for stored in fetched if _is_md5(stored.etag)]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            digests = pool.map(lambda stored: _md5(self.directory / stored.name), hashed)
            differing = [s for s, digest in zip(hashed, digests, strict=True) if s.etag != digest]
        for stored in differing:
            if self._is_etag_an_md5(stored):
                (self.directory / stored.name).unlink()
                raise InterruptedTransferError(f"{stored.name} arrived with another checksum")

    def _is_etag_an_md5(self, stored: StoredObject) -> bool:
        """Whether the store did not encrypt with a key of its own, which changes the ETag."""
        with translating(self.location, self.environ):
            head = self.client.head_object(
                Bucket=self.location.bucket, Key=stored.key, **request_payer(self.environ)
            )
        encryption = str(head.get("ServerSideEncryption", ""))
        return not encryption.startswith("aws:kms") and "SSECustomerAlgorithm" not in head


def _files_in(directory: Path) -> list[Path]:
    return [
        path
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(MANIFEST_NAME)
    ]


def _written_size(path: Path) -> int:
    """Bytes that are on the disk; parts arrive in any order, leaving holes."""
    try:
        status = path.stat()
    except FileNotFoundError:  # renamed meanwhile
        return 0
    return min(status.st_size, status.st_blocks * 512)


def _is_md5(etag: str) -> bool:
    return len(etag) == _MD5_HEX_DIGITS and all(c in "0123456789abcdef" for c in etag)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
