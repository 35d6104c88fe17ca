"""Where cache entries are kept between containers: a shared folder, or an object store.

An entry is one file under one name. It appears at once and whole, or not at all, so that several
replicas may save at the same time: the last one wins, and all of them are good.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from lmi_vllm.config.options.row import variable
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import FeatureSettings, ServerSettings
from lmi_vllm.features.compile_cache.archive import LIMITS, UnusableEntryError
from lmi_vllm.sources.base import ObjectStore
from lmi_vllm.sources.local import without_file_scheme
from lmi_vllm.sources.table import Sources
from lmi_vllm.sources.trusted_folders import untrusted_reason

_PARTIAL: Final = ".partial"
ABANDONED_SECONDS: Final = 86_400.0  # what a killed process left half done is removed


class CompileCacheSettings(FeatureSettings):
    """The folder or prefix that the cache is read from and written to."""

    # fmt: off
    lmi_cache_uri: str | None = variable(str.strip, "Folder or S3 prefix that keeps "
        "what vLLM compiled for the next container. It is refused in secure mode, and so is a "
        "world-writable folder: it holds code.", values="path or S3 URL")
    # fmt: on

    def check(self, server: ServerSettings, sources: Sources, fail: Callable[[str], None]) -> None:
        """Refuse what is neither a folder (path or `file:` URL) nor a prefix of an object store."""
        if self.lmi_cache_uri is None:
            return
        _, separator, rest = self.lmi_cache_uri.partition("://")
        is_known = sources.is_store(self.lmi_cache_uri) or self.lmi_cache_uri.startswith("file:")
        if separator and not (is_known and rest.strip("/")):
            example = sources.store_examples()[0].rstrip("/")
            stated = self.details.lmi_cache_uri.stated
            fail(f"{stated} cannot be used: write a folder or {example}")

    def forbidden_in_secure_mode(self) -> Iterator[str]:
        """Yield the refusal: write access there is code execution in the engine."""
        if self.lmi_cache_uri:
            yield "LMI_CACHE_URI is not allowed in secure mode: compiled code is read from there"


class CacheStore(Protocol):
    """Keeps entries. Every method raises `DownloadError`, `UnreachableError` or `OSError`."""

    @property
    def shown(self) -> str:
        """The location for logs, without credentials."""

    def fetch(self, name: str, scratch: Path) -> Path | None:
        """Return a local file with the entry, perhaps in the folder `scratch`; None without one.

        Raises:
            UnusableEntryError: there is one that must not be read.
        """

    def has(self, name: str) -> bool:
        """Whether there is such an entry."""

    def put(self, name: str, archive: Path) -> None:
        """Store `archive` as `name`; it replaces an earlier one atomically."""


def open_cache_store(uri: str, environ: Mapping[str, str], sources: Sources) -> CacheStore:
    """Return the store that LMI_CACHE_URI names; no request is sent yet.

    Raises:
        DownloadError: the URL of a store is not complete.
    """
    store = sources.store_of(uri.strip())
    if store is not None:
        return BucketStore(store.make_store(uri.strip(), environ))
    return FolderStore(Path(without_file_scheme(uri)).expanduser().absolute())


class BucketStore:
    """Entries below a prefix of an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def shown(self) -> str:
        """The prefix, without credentials."""
        return mask_urls(self._store.url)

    def fetch(self, name: str, scratch: Path) -> Path | None:
        """Fetch the entry into `scratch`."""
        stored = self._store.find(name)
        if stored is None:
            return None
        if stored.size > LIMITS.total_bytes:
            raise UnusableEntryError("it is larger than an entry may be")
        self._store.download((stored,), scratch, attempt=0)
        return scratch / stored.name

    def has(self, name: str) -> bool:
        """Whether the entry is there."""
        return self._store.find(name) is not None

    def put(self, name: str, archive: Path) -> None:
        """Upload the archive in one request."""
        self._store.upload(name, archive)


class FolderStore:
    """A folder that replicas share, such as a mounted volume.

    Compiled code is code: a folder or file that every user can write is neither read nor written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def shown(self) -> str:
        """The folder's path."""
        return mask_urls(str(self._folder))

    def fetch(self, name: str, scratch: Path) -> Path | None:
        """Return the entry's own file; None without one."""
        if not self._folder.exists():
            return None
        require_trusted(self._folder)
        if not self.has(name):
            return None
        require_trusted(self._folder, self._folder / name)
        return self._folder / name

    def has(self, name: str) -> bool:
        """Whether the entry is there."""
        return (self._folder / name).is_file()

    def put(self, name: str, archive: Path) -> None:
        """Copy beside it under a temporary name, then rename."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        require_trusted(self._folder)
        self._remove_abandoned()
        partial = self._folder / f"{name}.{secrets.token_hex(8)}{_PARTIAL}"
        try:
            with archive.open("rb") as source, partial.open("xb") as target:
                while block := source.read(1 << 20):
                    target.write(block)
                target.flush()
                os.fsync(target.fileno())
            partial.replace(self._folder / name)
        finally:
            partial.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        """Remove partial files of processes that were killed while they wrote."""
        for path in self._folder.glob(f"*{_PARTIAL}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()


def require_trusted(folder: Path, entry: Path | None = None) -> None:
    """Check that only the owner, the group and root can change `folder` and `entry`.

    Raises:
        UnusableEntryError: other users can; the text says what to do.
    """
    real = folder.resolve()
    places = (real,) if entry is None else (entry, real)
    if reason := untrusted_reason(places, real.parents, "compiled code"):
        raise UnusableEntryError(reason)
