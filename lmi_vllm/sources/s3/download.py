"""S3 models: listed, fetched into a temporary sibling, verified, renamed as the last step.

An interrupted fetch leaves the sibling (`<hash>.partial`) for the next one to complete; one process
at a time works on a destination; a cached result counts only while the store still lists the same
sizes and ETags. Names and rules per startup.md section 3.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.archives import extract_archive, is_archive
from lmi_vllm.sources.hub.files import is_weight_file
from lmi_vllm.sources.manifest import (
    MANIFEST_NAME,
    FetchManifest,
    manifest_of,
    read_manifest,
)
from lmi_vllm.sources.progress import ProgressSink
from lmi_vllm.sources.s3.partial import PartialDirectory
from lmi_vllm.sources.s3.store import (
    SCHEME,
    S3Location,
    StoredObject,
    StoreUnreachableError,
    list_objects,
    open_client,
    parse_location,
    read_text,
)
from lmi_vllm.sources.storage import InterruptedTransferError, exclusive, put_in_place

logger = logging.getLogger(__name__)

# The weights stay in the store: vLLM streams them from there, or reads none.
_WITHOUT_WEIGHTS: Final = ("runai_streamer", "runai_streamer_sharded", "dummy")


def cache_directory(url: str, environ: Mapping[str, str]) -> Path:
    """Where the model of `url` is kept: `<root>/download/<hash>`."""
    root = environ.get("SERVING_DOWNLOAD_DIR") or environ.get("DJL_CACHE_DIR")
    if not root:
        home = Path("~/.djl.ai").expanduser()
        usable = home if home.is_dir() else home.parent
        root = str(home if os.access(usable, os.W_OK) else Path(tempfile.gettempdir()) / ".djl.ai")
    digest = hashlib.sha256(url.strip().encode()).hexdigest()[:40]
    return Path(root).expanduser().absolute() / "download" / digest


def fetch_from_s3(
    url: str,
    environ: Mapping[str, str],
    load_format: str | None,
    on_progress: ProgressSink,
    destination: Path | None = None,
) -> Path:
    """The local directory with everything below `url`, or with what the archive there holds.

    With a load format that streams weights from the store itself, or reads none, only the other
    files are fetched.

    Raises:
        DownloadError: it cannot be had; the text says why and what to do.
    """
    location = parse_location(url)
    is_streamed = load_format in _WITHOUT_WEIGHTS and not location.is_archive
    target = destination or cache_directory(f"{url.strip()}#small" if is_streamed else url, environ)
    try:
        with exclusive(target.with_name(f"{target.name}.lock"), location.url) as lock:
            try:
                client = open_client(location, environ)
                objects = _listed(client, location, environ, is_streamed)
            except (StoreUnreachableError, InterruptedTransferError) as error:
                return _cached_anyway(target, location, str(error))
            if not _is_current(target, location, objects):
                partial = PartialDirectory(location, target, objects, environ, client, lock)
                _fetch(partial, on_progress)
    except OSError as error:
        raise DownloadError(
            f"{location.url} cannot be stored in {target.parent}: {error}"
        ) from error
    return entered(target)


def fetch_text_from_s3(url: str, environ: Mapping[str, str]) -> str | None:
    """The text of the object at `url`, None when there is none.

    Where the store is unreachable, the copy in the cached prefix answers.
    """
    folder, _, name = url.strip().rpartition("/")
    bucket, _, key = url.strip().removeprefix(SCHEME).partition("/")
    location = S3Location(url.strip(), bucket, key)
    try:
        return read_text(location, location.prefix, environ)
    except (StoreUnreachableError, InterruptedTransferError) as error:
        for form in (f"{folder}/", folder, f"{folder}/*"):
            directory = cache_directory(form, environ)
            if directory.is_dir():
                file = directory / name
                return file.read_text() if file.is_file() else None
        raise DownloadError(f"{location.url}: {error}") from error


def entered(directory: Path) -> Path:
    """`directory`, or the one directory in it when that is all it holds."""
    children = [child for child in directory.iterdir() if child.name != MANIFEST_NAME]
    if len(children) == 1 and children[0].is_dir():
        return entered(children[0])
    return directory


def _listed(
    client: Any,
    location: S3Location,
    environ: Mapping[str, str],
    is_streamed: bool,
) -> tuple[StoredObject, ...]:
    objects = list_objects(client, location, environ)
    if not objects:
        raise DownloadError(
            f"{location.url} holds no objects: check the prefix (s3://{location.bucket}/"
            f"{location.prefix}); a single file must be a .tar.gz, .tgz or .zip"
        )
    if is_streamed:
        return tuple(stored for stored in objects if not is_weight_file(stored.name))
    return objects


def _cached_anyway(target: Path, location: S3Location, reason: str) -> Path:
    manifest = read_manifest(target)
    if target.is_dir() and (manifest is None or manifest.is_on_disk(target)):
        logger.warning(
            "%s cannot be compared with its cached copy (%s): using the copy", location.url, reason
        )
        return entered(target)
    raise DownloadError(f"{location.url} cannot be fetched and is not in the cache: {reason}")


def _is_current(target: Path, location: S3Location, objects: Sequence[StoredObject]) -> bool:
    """Whether `target` is complete and the store has not changed since."""
    if not target.is_dir():
        return False
    wanted = manifest_of(location.url, objects)
    manifest = read_manifest(target)
    if manifest is None:  # fetched by the container that we replace: sizes are all there is
        return bool(objects) and wanted.is_on_disk(target)
    if dict(manifest.objects) != dict(wanted.objects):
        logger.info("%s has changed in the store: fetching what is new", location.url)
        return False
    return manifest.is_on_disk(target)


def _fetch(partial: PartialDirectory, on_progress: ProgressSink) -> None:
    partial.prepare()
    partial.fill(on_progress)
    archive = _only_archive(partial.objects)
    if archive is None:
        put_in_place(partial.directory, partial.target)
        return
    extracted = partial.target.with_name(f"{partial.target.name}.extracted")
    shutil.rmtree(extracted, ignore_errors=True)
    try:
        with partial.naming_full_disk():
            sizes = extract_archive(
                partial.directory / archive.name, extracted, partial.location.url
            )
        objects = {archive.name: (archive.size, archive.etag)}
        FetchManifest(partial.location.url, objects, sizes).write(extracted)
        put_in_place(extracted, partial.target)
    finally:
        shutil.rmtree(extracted, ignore_errors=True)
    shutil.rmtree(partial.directory, ignore_errors=True)


def _only_archive(objects: Sequence[StoredObject]) -> StoredObject | None:
    """The archive that is all there is, and is therefore replaced by its content."""
    only = objects[0] if len(objects) == 1 else None
    return only if only is not None and is_archive(only.name) else None
