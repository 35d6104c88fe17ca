"""Models in an object store: listed, fetched into a temporary sibling, verified, renamed last.

An interrupted fetch leaves the sibling (`<hash>.partial`), which the next fetch completes. One
process at a time works on a destination. A cached result counts only while the store lists the same
sizes and ETags. `StoreSource` is the same for all stores.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores.partial import PartialDirectory
from lmi_vllm.features.transfer import (
    FetchManifest,
    file_lock,
    is_weight_file,
    naming_what_is_slow,
    read_manifest,
    replace_directory,
)
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.sources.base import (
    FetchRequest,
    InterruptedTransferError,
    Limits,
    NothingThereError,
    ObjectStore,
    StoredObject,
    UnreachableError,
)
from lmi_vllm.sources.extract import extract_archive
from lmi_vllm.sources.local import cache_directory, skip_single_folders

logger = logging.getLogger(__name__)

# The weights stay in the store: vLLM streams them from there, or reads none.
_WITHOUT_WEIGHTS: Final = ("runai_streamer", "runai_streamer_sharded", "dummy")
_UNAVAILABLE: Final = (UnreachableError, InterruptedTransferError)


@dataclass(frozen=True, slots=True)
class StoreSource:
    """The source of one URL scheme, whose stores `make_store` opens.

    What lies below such a URL is a whole model directory: its options, code and adapters count,
    while a hub model is weights alone. `is_streamed_by_vllm`: its Run:ai loader knows the scheme.
    """

    scheme: str
    make_store: Callable[[str, Mapping[str, str]], ObjectStore]
    is_streamed_by_vllm: bool = False
    claimed: re.Pattern[str] | None = None  # the begin of further URLs, of no other source
    problem_of: Callable[[str], str] = lambda _: ""
    lacking_of: Callable[[str, Mapping[str, str]], str] = lambda _url, _environ: ""
    bucket: str = "bucket"  # in examples

    @property
    def examples(self) -> tuple[str, ...]:
        """Example URLs for messages: a prefix and an archive."""
        root = f"{self.scheme}://{self.bucket}"
        return (f"{root}/prefix/", f"{root}/model.tar.gz")

    def claims(self, reference: str) -> bool:
        """Whether it is a URL of this scheme, or one of `claimed`."""
        is_ours = reference.lower().startswith(f"{self.scheme}://")
        return is_ours or (self.claimed is not None and bool(self.claimed.match(reference)))

    def problem(self, reference: str) -> str:
        """Why the URL cannot be read on this machine; empty if it can."""
        return self.problem_of(reference.strip())

    def lacking(self, reference: str, environ: Mapping[str, str]) -> str:
        """What the variables lack to read the URL, if its form can be read; empty for nothing."""
        return self.lacking_of(reference.strip(), environ)

    def fetch(self, request: FetchRequest) -> Path:
        """Return the local directory with all below the URL, or with the archive's content.

        With a load format that streams weights from the store itself, or reads none, only the other
        files are fetched.

        Raises:
            DownloadError: it cannot be fetched; the text says why and what to do.
        """
        store = self.make_store(request.reference, request.environ)
        with_weights = self._fetches_weights(request.load_format) or is_archive(store.url)
        part = "#adapter" if request.select else "" if with_weights else "#small"
        cached = cache_directory(store.url + part, request.environ)
        target = request.destination or cached
        try:
            lock = target.with_name(f"{target.name}.lock")
            with file_lock(lock, store.url, is_removed=target != cached):
                _update(store, target, request, with_weights=with_weights)
        except OSError as error:
            raise DownloadError(
                f"{store.url} cannot be stored in {target.parent}: {error}"
            ) from error
        return skip_single_folders(target)

    def _fetches_weights(self, load_format: str | None) -> bool:
        is_streamed = self.is_streamed_by_vllm or load_format == "dummy"
        return load_format not in _WITHOUT_WEIGHTS or not is_streamed

    def require_objects(self, request: FetchRequest) -> None:
        """Raise `NothingThereError` if the store answers, and has nothing below the URL."""
        with contextlib.suppress(*_UNAVAILABLE):
            _listed(self.make_store(request.reference, request.environ), request, with_weights=True)

    def read_text(self, request: FetchRequest, name: str) -> str | None:
        """Return the text of one object below the URL; None without one.

        Where the store is unreachable, the cached prefix is read instead.

        Raises:
            DownloadError: the store is unreachable and the prefix is not cached.
        """
        folder = request.reference.rstrip("/*")
        store = self.make_store(f"{folder}/", request.environ)
        try:
            with naming_what_is_slow(f"{folder}/{name}"):
                content = store.read(name)
        except _UNAVAILABLE as error:
            for form in (f"{folder}/", folder, f"{folder}/*"):
                directory = cache_directory(form, request.environ)
                if directory.is_dir():
                    file = directory / name
                    return file.read_text() if file.is_file() else None
            raise DownloadError(f"{folder}/{name}: {error}") from error
        return None if content is None else content.decode()


def _update(store: ObjectStore, target: Path, request: FetchRequest, *, with_weights: bool) -> None:
    try:
        objects = _listed(store, request, with_weights=with_weights)
    except _UNAVAILABLE as error:
        manifest = read_manifest(target)
        if not target.is_dir() or (manifest is not None and not manifest.is_on_disk(target)):
            raise DownloadError(
                f"{store.url} cannot be fetched and is not in the cache: {error}"
            ) from error
        logger.warning(
            "%s cannot be compared with its cached copy (%s): using the copy", store.url, error
        )
        return
    if not _is_current(target, store.url, objects):
        _fetch(PartialDirectory(store, target, objects), request)


def _listed(
    store: ObjectStore, request: FetchRequest, *, with_weights: bool
) -> tuple[StoredObject, ...]:
    limits = request.limits
    with naming_what_is_slow(store.url):
        objects = store.list_objects(limits.files if limits else None)
    if objects and request.select is not None:
        chosen = request.select({stored.name: stored.size for stored in objects}, store.url)
        objects = [stored for stored in objects if stored.name in chosen]
    if limits is not None:
        limits.check(store.url, len(objects), sum(stored.size for stored in objects))
    if not objects:
        raise NothingThereError(
            f"{store.url} holds no objects: check the prefix ({store.listed_url}); a single file "
            "must be a .tar.gz, .tgz, .tar or .zip"
        )
    return tuple(stored for stored in objects if with_weights or not is_weight_file(stored.name))


def _is_current(target: Path, url: str, objects: Sequence[StoredObject]) -> bool:
    """Whether `target` is complete and the store has not changed since."""
    if not target.is_dir():
        return False
    wanted = FetchManifest.of(url, objects)
    manifest = read_manifest(target)
    if manifest is None:  # of LMI's container, which writes none: only sizes can be compared
        return bool(objects) and wanted.is_on_disk(target)
    if dict(manifest.objects) != dict(wanted.objects):
        logger.info("%s has changed in the store: fetching what is new", url)
        return False
    return manifest.is_on_disk(target)


def _fetch(partial: PartialDirectory, request: FetchRequest) -> None:
    partial.prepare()
    partial.fill(request.on_progress)
    only = partial.objects[0] if len(partial.objects) == 1 else None
    if only is not None and is_archive(only.name):  # replaced by its content
        _extract(partial, only, request.limits)
    else:
        replace_directory(partial.directory, partial.target)


def _extract(partial: PartialDirectory, archive: StoredObject, limits: Limits | None) -> None:
    extracted = partial.target.with_name(f"{partial.target.name}.extracted")
    shutil.rmtree(extracted, ignore_errors=True)
    url = partial.store.url
    try:
        with partial.reporting_full_disk():
            sizes = extract_archive(partial.directory / archive.name, extracted, url, limits)
        FetchManifest(url, {archive.name: (archive.size, archive.etag)}, sizes).write(extracted)
        replace_directory(extracted, partial.target)
    finally:
        shutil.rmtree(extracted, ignore_errors=True)
    shutil.rmtree(partial.directory, ignore_errors=True)
