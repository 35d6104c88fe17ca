"""The one table of places that models and adapters come from, and what callers ask of it.

A further place is a row in `SOURCES` and a module: a store of objects implements `ObjectStore`,
anything else `Source` (base.py).
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import FetchRequest, Limits, ObjectStore, Source
from lmi_vllm.sources.hub.source import Hub
from lmi_vllm.sources.local import LocalPaths
from lmi_vllm.sources.object_store import StoreSource
from lmi_vllm.sources.progress import ProgressSink, ignore_progress
from lmi_vllm.sources.s3.store import S3Store
from lmi_vllm.sources.storage import MANIFEST_NAME

SOURCES: Final[tuple[Source, ...]] = (
    LocalPaths(),
    StoreSource("s3", S3Store, is_streamed_by_vllm=True),
    Hub(),  # last: it takes whatever no other row has claimed
)


def source_of(reference: str) -> Source:
    """The row that `reference` belongs to."""
    return next(source for source in SOURCES if source.claims(reference))


def fetch_model(  # noqa: PLR0913 - one name for each thing that start-up knows
    reference: str,
    *,
    revision: str | None = None,
    environ: Mapping[str, str],
    load_format: str | None = None,
    ignore_patterns: Sequence[str] | None = None,
    download_dir: Path | None = None,
    destination: Path | None = None,
    on_progress: ProgressSink = ignore_progress,
    limits: Limits | None = None,
) -> Path:
    """A local directory with the model or adapter that `reference` names. Blocks while it fetches.

    `revision`, `ignore_patterns` and `download_dir` (the hub's cache directory) apply to hub ids
    only, as do the rules which files are left out. `destination` gets plain files, in place of any
    cache and by the same rules: renamed when complete, left alone while the source is unchanged.

    Raises:
        DownloadError: the text names the source, the reason and what to do; or what `destination`
            holds already.
    """
    if destination is not None:
        destination = destination.expanduser().absolute()
        _require_usable(destination)
    request = FetchRequest(
        reference.strip(), environ, revision, load_format, ignore_patterns, download_dir,
        destination, on_progress, limits,
    )  # fmt: skip
    return source_of(request.reference).fetch(request)


def _require_usable(destination: Path) -> None:
    if not destination.exists():
        return
    if os.path.ismount(destination):
        raise DownloadError(
            f"{destination} is a mount point, which cannot be replaced when the model is complete: "
            f"name a directory below it, such as {destination / 'model'}"
        )
    if not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / MANIFEST_NAME).exists()
    ):
        raise DownloadError(
            f"{destination} is not empty and was not made by lmi-vllm fetch: name another directory"
        )


def read_text(
    reference: str, name: str, environ: Mapping[str, str], revision: str | None = None
) -> str | None:
    """One small file of what `reference` names, before anything is fetched; None without one.

    Raises:
        DownloadError: the source refused, or is unreachable and has no cached copy.
    """
    request = FetchRequest(reference.strip(), environ, revision)
    return source_of(request.reference).read_text(request, name)


def open_store(url: str, environ: Mapping[str, str]) -> ObjectStore | None:
    """The store of objects behind `url`; None where it names something else.

    Raises:
        DownloadError: the URL is not complete.
    """
    source = source_of(url.strip())
    return source.make_store(url.strip(), environ) if isinstance(source, StoreSource) else None


def is_store(reference: str) -> bool:
    """Whether `reference` is a URL of a store, below which a whole model directory lies."""
    return isinstance(source_of(reference.strip()), StoreSource)


def is_streamed_by_vllm(reference: str) -> bool:
    """Whether vLLM's Run:ai loader reads weights from `reference` by itself."""
    source = source_of(reference.strip())
    return isinstance(source, StoreSource) and source.is_streamed_by_vllm


def store_examples() -> tuple[str, ...]:
    """How URLs of stores are written, for people: a prefix and an archive of each."""
    stores = [source for source in SOURCES if isinstance(source, StoreSource)]
    return tuple(example for store in stores for example in store.examples)


def upload_directory(directory: Path, url: str, environ: Mapping[str, str]) -> int:
    """Copy every file below `directory` to the store at `url`, and return how many.

    Raises:
        DownloadError: the store refuses, or `url` names none.
        UnreachableError: the store does not answer.
    """
    store = open_store(url, environ)
    if store is None:
        raise DownloadError(f"{url} is no URL of a store, such as {store_examples()[0]}")
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    for path in files:
        store.upload(path.relative_to(directory).as_posix(), path)
    return len(files)
