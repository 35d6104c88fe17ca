"""Models fetched into a directory of the user's choice, for images and init containers.

The same rules hold as for the cache: a temporary sibling, renamed when complete; a second run asks
whether the source has changed and otherwise does nothing.
"""

import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.hub.download import commit_of, fetch_from_hub
from lmi_vllm.sources.hub.errors import HubUnreachableError
from lmi_vllm.sources.hub.location import HubSource, hub_source
from lmi_vllm.sources.manifest import MANIFEST_NAME, FetchManifest, read_manifest
from lmi_vllm.sources.progress import ProgressSink, ignore_progress
from lmi_vllm.sources.s3.download import fetch_from_s3
from lmi_vllm.sources.s3.store import SCHEME
from lmi_vllm.sources.storage import exclusive, put_in_place

logger = logging.getLogger(__name__)


def fetch_model_to(
    reference: str,
    destination: Path,
    *,
    revision: str | None = None,
    environ: Mapping[str, str],
    load_format: str | None = None,
    on_progress: ProgressSink = ignore_progress,
) -> Path:
    """`destination`, holding the model that `reference` names as plain files.

    Raises:
        DownloadError: it cannot be had, or `destination` holds something else.
    """
    destination = destination.expanduser().absolute()
    _require_usable(destination)
    if Path(reference).exists():
        raise DownloadError(f"{reference} is a local path already: copy it to {destination}")
    if reference.startswith(SCHEME):
        return fetch_from_s3(reference, environ, load_format, on_progress, destination)
    source = hub_source(reference, revision, environ)
    with exclusive(destination.with_name(f"{destination.name}.lock"), source.label):
        try:
            _fetch(source, destination, load_format, on_progress)
        except OSError as error:
            raise DownloadError(
                f"{source.label} cannot be stored at {destination}: {error}"
            ) from error
    return destination


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


def _fetch(
    source: HubSource, destination: Path, load_format: str | None, on_progress: ProgressSink
) -> None:
    """Fetch into a hub cache beside `destination` (or take the offline cache), then place it."""
    present = read_manifest(destination)
    try:
        commit = "" if source.is_offline else commit_of(source)
    except HubUnreachableError as error:
        if present and present.source.startswith(f"{source.repository}@"):
            logger.warning("%s: %s: keeping what is there", source.endpoint, error)
            return
        raise DownloadError(f"{source.label} cannot be fetched: {error}") from error
    wanted = f"{source.repository}@{commit}"
    if present and present.source == wanted and present.is_on_disk(destination):
        return
    cache = destination.with_name(f"{destination.name}.partial")
    if not source.is_offline:
        source = dataclasses.replace(source, cache=cache)
    snapshot = fetch_from_hub(source, load_format, None, on_progress)
    _place(source, snapshot, destination)
    shutil.rmtree(cache, ignore_errors=True)


def _place(source: HubSource, snapshot: Path, destination: Path) -> None:
    """Make `destination` of the files that the links of `snapshot` lead to."""
    ready = destination.with_name(f"{destination.name}.ready")
    shutil.rmtree(ready, ignore_errors=True)
    sizes: dict[str, int] = {}
    for path in sorted(path for path in snapshot.rglob("*") if path.is_file()):
        name = str(path.relative_to(snapshot))
        (ready / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), ready / name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, ready / name)
        sizes[name] = path.stat().st_size
    FetchManifest(f"{source.repository}@{snapshot.name}", {}, sizes).write(ready)
    put_in_place(ready, destination)
