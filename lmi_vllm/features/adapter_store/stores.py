"""The kinds of adapter stores: one folder for each adapter's name. Every call may block."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from lmi_vllm.adapters.listing import adapter_files
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.checks.adapter_config import CONFIG
from lmi_vllm.errors import (
    AdapterRefusedError,
    DownloadError,
    MissingRepositoryError,
    TooManyObjectsError,
)
from lmi_vllm.features.adapter_store.settings import HUB_PREFIX
from lmi_vllm.features.transfer import read_manifest
from lmi_vllm.sources.base import (
    FetchRequest,
    InterruptedTransferError,
    ObjectStore,
    UnreachableError,
)
from lmi_vllm.sources.local import without_file_scheme

_VERSION_DIGITS: Final = 16
_FIRST_PAGE: Final = 1000  # objects that a store lists at once


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter as the store has it now; `version` changes whenever one of its files does."""

    name: str
    src: str
    version: str
    files: int
    total_bytes: int


class AdapterStore(Protocol):
    """Finds and fetches adapters; both methods raise what an `ObjectStore` raises."""

    def look_up(self, name: str) -> StoredAdapter | None:
        """Return the adapter of that name; None where there is none.

        Raises:
            AdapterRefusedError: there is a part of one.
        """

    def fetch(self, found: StoredAdapter, target: Path) -> str:
        """Return the directory with its files, after the checks that every adapter passes.

        Files that are not local are fetched to `target`, which appears whole or not at all.
        """


@dataclass(frozen=True, slots=True)
class _Remote:
    """Fetches adapters by the sources of models."""

    sources: AdapterSources

    def fetch(self, found: StoredAdapter, target: Path) -> str:
        """Return `target` with the present files, fetched unless an earlier process has."""
        request = FetchRequest(
            found.src,
            self.sources.environ,
            found.version,  # a hub's commit; other stores have no revisions
            destination=target,
            limits=self.sources.limits,
            select=adapter_files,
        )
        self.sources.sources.fetch_model(request)
        return self.sources.checked(target, found.name)


@dataclass(frozen=True, slots=True)
class ObjectFolders(_Remote):
    """The folders below a URL of an object store."""

    store: ObjectStore

    def look_up(self, name: str) -> StoredAdapter | None:
        """Return the adapter whose objects lie below the name's folder, by one listing."""
        folder, limits = self.store.below(name), self.sources.limits
        objects = tuple(folder.list_objects(limits.files))
        if not any(stored.name == CONFIG for stored in objects):
            return None
        chosen = _adapter_files({stored.name: stored.size for stored in objects}, name)
        objects = tuple(stored for stored in objects if stored.name in chosen)
        total = sum(stored.size for stored in objects)
        version = _digest((stored.name, stored.size, stored.etag) for stored in objects)
        return StoredAdapter(name, folder.listed_url, version, len(objects), total)

    def fault_of_place(self) -> str:
        """Return why no adapter is found anywhere below the URL now; "" where one may be."""
        try:
            is_empty = not self.store.list_objects(_FIRST_PAGE)
        except TooManyObjectsError:
            return ""
        except DownloadError as error:
            return error.text
        except (UnreachableError, InterruptedTransferError) as error:
            return str(error)
        return "there is nothing below this URL" if is_empty else ""

    def fetch(self, found: StoredAdapter, target: Path) -> str:
        """Return `target` with the files of the version that was found."""
        path = super(ObjectFolders, self).fetch(found, target)  # slots: no bare super()
        manifest = read_manifest(target)
        objects = {} if manifest is None else manifest.objects
        if _digest((name, *of) for name, of in objects.items()) != found.version:
            raise DownloadError(f"{found.src} has changed while it was fetched")
        return path


@dataclass(frozen=True, slots=True)
class HubRepositories(_Remote):
    """The repositories of one owner at the hub."""

    owner: str
    environ: Mapping[str, str]

    def look_up(self, name: str) -> StoredAdapter | None:
        """Return the repository at its newest commit; None also where the hub hides it."""
        repository = f"{self.owner}/{name}"
        try:
            files = self.sources.sources.hub.list_files(FetchRequest(repository, self.environ))
        except MissingRepositoryError:  # any other refusal is none of the adapter: it is not gone
            return None
        sizes = files.sizes
        if CONFIG not in sizes or not files.commit:
            return None
        chosen = _adapter_files(sizes, name)
        total = sum(sizes[one] for one in chosen)
        return StoredAdapter(name, repository, files.commit, len(chosen), total)


@dataclass(frozen=True, slots=True)
class LocalFolders:
    """The folders in a local one; they are used in place."""

    root: Path
    sources: AdapterSources

    def look_up(self, name: str) -> StoredAdapter | None:
        """Return the adapter in the folder of that name."""
        folder = self.root / name
        if not (folder / CONFIG).is_file():
            return None
        files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
        version = _digest((str(path), found.st_size, found.st_mtime_ns) for path, found in files)
        total = sum(found.st_size for _, found in files)
        return StoredAdapter(name, str(folder), version, len(files), total)

    def fetch(self, found: StoredAdapter, target: Path) -> str:
        """Return the folder itself, checked."""
        return self.sources.resolve(found.src)


def open_adapter_store(
    location: str, sources: AdapterSources, environ: Mapping[str, str]
) -> AdapterStore:
    """Return the store that `option.adapter_store` names.

    Raises:
        DownloadError: the URL is not complete.
    """
    if location.startswith(HUB_PREFIX):
        return HubRepositories(sources, location.removeprefix(HUB_PREFIX).strip("/"), environ)
    location = without_file_scheme(location)
    if "://" not in location:
        return LocalFolders(Path(location).absolute(), sources)
    url = f"{location.rstrip('/')}/"
    if (store := sources.sources.store_of(url)) is None:
        known = " or ".join(one.examples[0] for one in sources.sources.stores)
        raise DownloadError(f"option.adapter_store={location}: expected {known}, hf:// or a folder")
    return ObjectFolders(sources, store.make_store(url, environ))


def _adapter_files(sizes: Mapping[str, int], name: str) -> Collection[str]:
    try:
        return adapter_files(sizes, name)
    except DownloadError as error:  # of the adapter, not of the store
        raise AdapterRefusedError(error.text) from error


def _digest(files: Iterable[Sequence[object]]) -> str:
    text = "\n".join(sorted(repr(tuple(file)) for file in files))
    return hashlib.sha256(text.encode()).hexdigest()[:_VERSION_DIGITS]
