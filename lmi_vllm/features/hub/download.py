"""Hub models: fetched through huggingface_hub into the hub's own cache, before the engine starts.

One listing gives names and sizes; from it come the files to fetch, the check of the disk and the
totals of the progress. The library fetches each file under a temporary name and renames it, so that
what an interrupted run has completed is used by the next one.
"""

import contextlib
import glob
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError, MissingRepositoryError
from lmi_vllm.features.hub.api import model_info
from lmi_vllm.features.hub.errors import hiding_signed_urls, translating
from lmi_vllm.features.hub.files import FileSelection, needs_weights, select_files
from lmi_vllm.features.hub.location import HubRepository
from lmi_vllm.features.transfer import (
    Measure,
    file_lock,
    has_size,
    reporting,
    with_retries,
    without_secrets,
    written_size,
)
from lmi_vllm.sources.base import (
    FetchRequest,
    InterruptedTransferError,
    ProgressSink,
    RefusedAccessError,
    UnreachableError,
)
from lmi_vllm.sources.disk import reporting_full_disk, require_space

logger = logging.getLogger(__name__)

SPACE_ADVICE: Final = "set HF_HOME (or option.download_dir) to a larger disk"
_STALE_SECONDS: Final = 3600.0
_SHOWN_NAMES: Final = 5
_Select = Callable[[Iterable[str]], FileSelection]


@dataclass(frozen=True, slots=True)
class _Listing:
    """A repository's files that will be fetched, at one commit."""

    commit: str
    sizes: Mapping[str, int]
    blobs: frozenset[str]  # their names in the cache's blobs folder


def fetch_from_hub(source: HubRepository, request: FetchRequest) -> Path:
    """The local snapshot directory of `source`, with every file that vLLM will read.

    Raises:
        DownloadError: it cannot be had; the text says why and what to do.
    """

    def select(names: Iterable[str]) -> FileSelection:
        if request.select is not None:
            sizes = names if isinstance(names, Mapping) else dict.fromkeys(names, 0)
            files = tuple(request.select(sizes, source.label))
            return FileSelection(files, files)
        return select_files(names, request.load_format, request.ignore_patterns)

    if source.is_offline:
        return _cached_snapshot(source, select, "HF_HUB_OFFLINE is set")
    with hiding_signed_urls():
        listing = _listing_or_copy(source, select, request.load_format)
        if isinstance(listing, Path):
            return listing
        try:
            if request.limits is not None:
                sizes = listing.sizes
                request.limits.check(source.label, len(sizes), sum(sizes.values()))
            return _download(source, listing, request.on_progress)
        except OSError as error:
            raise DownloadError(
                f"{source.label} cannot be stored in {source.cache}: {error}"
            ) from error


def _listing_or_copy(
    source: HubRepository, select: _Select, load_format: str | None
) -> "_Listing | Path":
    """Return the files to fetch, or the complete copy in the cache if the hub gives no list.

    The hub may be away, overloaded or refuse the token: what was fetched before is served then.

    Raises:
        DownloadError: the hub refused, or does not answer, and no complete copy is cached.
    """

    def ask(_: int) -> _Listing | Path:
        try:
            return _list_files(source, select, load_format)
        except (
            UnreachableError,
            InterruptedTransferError,
            RefusedAccessError,
            MissingRepositoryError,  # it was there: or the token that may read it is gone
        ) as error:
            with contextlib.suppress(DownloadError):
                snapshot = _cached_snapshot(source, select, "")
                logger.warning(
                    "%s gives no list of files (%s): using the cached copy of %s",
                    source.endpoint,
                    error,
                    source.label,
                )
                return snapshot
            if isinstance(error, UnreachableError):  # the network may not be there yet
                raise InterruptedTransferError(f"{source.endpoint}: {error}") from error
            raise

    try:
        return with_retries(source.label, ask)
    except DownloadError as error:
        interrupted = error.__cause__
        if isinstance(interrupted, InterruptedTransferError) and isinstance(
            interrupted.__cause__, UnreachableError
        ):
            return _cached_snapshot(source, select, str(interrupted))  # says what is missing
        raise


def _list_files(source: HubRepository, select: _Select, load_format: str | None) -> _Listing:
    info = model_info(source, with_files=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    selection = select({name: sibling.size or 0 for name, sibling in siblings.items()})
    if needs_weights(load_format) and not selection.has_weights:
        raise _no_weights(source, siblings, load_format)
    chosen = [siblings[name] for name in selection.files]
    return _Listing(
        commit=info.sha or "",
        sizes={sibling.rfilename: sibling.size or 0 for sibling in chosen},
        blobs=frozenset(s.lfs.sha256 if s.lfs else s.blob_id or "" for s in chosen),
    )


def _no_weights(
    source: HubRepository, names: Iterable[str], load_format: str | None
) -> DownloadError:
    found = sorted(names)
    shown = ", ".join([*found[:_SHOWN_NAMES], *(["..."] if found[_SHOWN_NAMES:] else [])])
    return DownloadError(
        f"{source.label} has no weights for load_format={load_format or 'auto'}; it holds "
        f"{shown or 'no files'}. Name a repository with safetensors or bin weights, or set "
        "option.load_format"
    )


def _download(source: HubRepository, listing: _Listing, on_progress: ProgressSink) -> Path:
    snapshot = source.folder / "snapshots" / listing.commit
    if _is_complete(source, listing, snapshot):
        return snapshot  # without a lock: the cache may be a read-only mount
    with file_lock(source.folder / ".lmi-fetch.lock", source.label):
        _remove_stale_partials(source.folder / "blobs")
        missing = sum(
            size for name, size in listing.sizes.items() if not (snapshot / name).is_file()
        )
        require_space(source.label, missing, source.cache, SPACE_ADVICE)
        measure = Measure(
            len(listing.sizes),
            sum(listing.sizes.values()),
            lambda: _arrived(listing, snapshot, source.folder / "blobs"),
        )
        with (
            reporting(measure, on_progress),
            reporting_full_disk(source.label, missing, source.cache, SPACE_ADVICE),
        ):
            with_retries(source.label, lambda _: _transfer(source, listing))
    return _verified(source, listing, snapshot)


def _transfer(source: HubRepository, listing: _Listing) -> None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415
    from huggingface_hub.utils.tqdm import tqdm  # noqa: PLC0415

    class SilentBar(tqdm):
        """Shows nothing: progress is ours to report."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    try:
        with translating(source):
            snapshot_download(
                source.repository,
                revision=source.revision,
                endpoint=source.endpoint,
                token=source.token or False,
                cache_dir=source.cache,
                etag_timeout=source.metadata_timeout_seconds,
                allow_patterns=[glob.escape(name) for name in listing.sizes],
                tqdm_class=SilentBar,
            )
    except (UnreachableError, LocalEntryNotFoundError) as error:
        raise InterruptedTransferError(without_secrets(str(error.__cause__ or error))) from error


def _arrived(listing: _Listing, snapshot: Path, blobs: Path) -> tuple[int, int]:
    """Files and bytes of `listing` that are in the cache, files still in transfer included."""
    done = [name for name in listing.sizes if (snapshot / name).is_file()]
    size = sum(listing.sizes[name] for name in done)
    for partial in blobs.glob("*.incomplete"):
        if partial.name.partition(".")[0] in listing.blobs:
            size += written_size(partial)  # xet writes files of their full size from many ends
    return len(done), size


def _remove_stale_partials(blobs: Path) -> None:
    """Delete what killed downloads have left: the library never reuses a partial file."""
    for partial in blobs.glob("*.incomplete"):
        try:
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                partial.unlink()
        except OSError:
            logger.debug("Could not remove %s", partial)


def _is_complete(source: HubRepository, listing: _Listing, snapshot: Path) -> bool:
    """Whether nothing is missing, and the cache knows which commit the revision stands for."""
    reference = source.folder / "refs" / (source.revision or "main")
    is_known = source.revision == listing.commit or (
        reference.is_file() and reference.read_text().strip() == listing.commit
    )
    return is_known and all(has_size(snapshot / name, size) for name, size in listing.sizes.items())


def _verified(source: HubRepository, listing: _Listing, snapshot: Path) -> Path:
    """`snapshot`, once every file is there with the size the hub announced."""
    for name, size in listing.sizes.items():
        path = snapshot / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            problem = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise DownloadError(
                f"{source.label}: {name} {problem} in {snapshot}: delete that file (and the blob "
                "it points to) and start again"
            )
    return snapshot


def _cached_snapshot(source: HubRepository, select: _Select, reason: str) -> Path:
    """The snapshot that is already in the cache.

    Raises:
        DownloadError: there is none, or its configuration or weights are incomplete.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        with translating(source):
            snapshot = Path(
                snapshot_download(
                    source.repository,
                    revision=source.revision,
                    cache_dir=source.cache,
                    local_files_only=True,
                    allow_patterns=[],  # only locate it: what must be in it is decided below
                )
            )
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{source.label} cannot be fetched ({reason}) and is not in the cache {source.cache}: "
            "fetch it once with network access (lmi-vllm fetch) or correct HF_HOME"
        ) from error
    missing = _missing_files(source, snapshot, select)
    if missing:
        raise DownloadError(
            f"{source.label} cannot be fetched ({reason}) and its cached copy {snapshot} is "
            f"incomplete, {missing[0]} and {len(missing) - 1} more are missing: fetch it again "
            "with network access"
        )
    return snapshot


def _missing_files(source: HubRepository, snapshot: Path, select: _Select) -> list[str]:
    """Weights and configuration that the cached snapshot lacks; other files may be absent."""
    listed = _cached_names(source)
    if listed is not None:
        needed = [*select(listed).weights, *({"config.json"} & set(listed))]
    else:  # filled by another tool: the weights' own index is all there is to go by
        needed = _indexed_shards(snapshot)
    return [name for name in needed if not (snapshot / name).is_file()]


def _cached_names(source: HubRepository) -> list[str] | None:
    from huggingface_hub import get_cached_repo_tree  # noqa: PLC0415
    from huggingface_hub.errors import CachedRepoTreeNotFoundError  # noqa: PLC0415

    try:
        tree = get_cached_repo_tree(
            source.repository, revision=source.revision, cache_dir=source.cache
        )
    except CachedRepoTreeNotFoundError:
        return None
    return [file.path for file in tree]


def _indexed_shards(snapshot: Path) -> list[str]:
    try:
        index = json.loads((snapshot / "model.safetensors.index.json").read_bytes())
    except OSError:
        return []
    return sorted(set(index.get("weight_map", {}).values()))
