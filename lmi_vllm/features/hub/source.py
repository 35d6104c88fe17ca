"""The Hugging Face hub, or what stands in for it (HF_ENDPOINT), as a source of models."""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.hub.api import commit_of, has_no_answer, model_info, read_hub_text
from lmi_vllm.features.hub.download import fetch_from_hub
from lmi_vllm.features.hub.location import HubRepository, hub_repository
from lmi_vllm.features.transfer import (
    FetchManifest,
    file_lock,
    link_or_copy,
    read_manifest,
    replace_directory,
)
from lmi_vllm.sources.base import FetchRequest, RepositoryFiles, UnreachableError

logger = logging.getLogger(__name__)


class HuggingFaceHub:
    """The source of everything else: hub ids, `owner/name`."""

    def claims(self, reference: str) -> bool:
        """Always; the hub's own rules say what is no id."""
        return True

    def fetch(self, request: FetchRequest) -> Path:
        """The snapshot in the hub's cache, or the destination with its files as plain files."""
        source = _repository(request)
        target = request.destination
        if target is None:
            return fetch_from_hub(source, request)
        try:
            lock = target.with_name(f"{target.name}.lock")
            with file_lock(lock, source.label, is_removed=True):
                _fetch_to(source, request, target)
        except OSError as error:
            raise DownloadError(f"{source.label} cannot be stored at {target}: {error}") from error
        return target

    def read_text(self, request: FetchRequest, name: str) -> str | None:
        """One small file of the repository, over the network and past any cache."""
        return read_hub_text(_repository(request), name)

    def list_files(self, request: FetchRequest) -> RepositoryFiles:
        """Every file of the repository at its newest commit."""
        info = model_info(_repository(request), with_files=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return RepositoryFiles(info.sha or "", sizes)


HUB: Final = HuggingFaceHub()


def _repository(request: FetchRequest) -> HubRepository:
    return hub_repository(
        request.reference, request.revision, request.environ, request.download_dir
    )


def _fetch_to(source: HubRepository, request: FetchRequest, target: Path) -> None:
    """Fetch into a hub cache beside `target` (or take the offline cache), then place it."""
    present = read_manifest(target)
    try:
        commit = "" if source.is_offline else commit_of(source)
    except (UnreachableError, DownloadError) as error:
        if isinstance(error, DownloadError) and not has_no_answer(error):
            raise
        if present and present.source.startswith(f"{source.repository}@"):
            logger.warning("%s: %s: keeping what is there", source.endpoint, error)
            return
        if isinstance(error, DownloadError):
            raise
        raise DownloadError(f"{source.label} cannot be fetched: {error}") from error
    wanted = f"{source.repository}@{commit}"
    if present and present.source == wanted and present.is_on_disk(target):
        return
    cache = target.with_name(f"{target.name}.partial")
    if not source.is_offline:
        source = dataclasses.replace(source, cache=cache)
    snapshot = fetch_from_hub(source, request)
    ready = target.with_name(f"{target.name}.ready")
    shutil.rmtree(ready, ignore_errors=True)
    shutil.copytree(snapshot, ready, copy_function=link_or_copy)
    sizes = {
        str(path.relative_to(ready)): path.stat().st_size
        for path in sorted(ready.rglob("*"))
        if path.is_file()
    }
    FetchManifest(f"{source.repository}@{snapshot.name}", {}, sizes).write(ready)
    replace_directory(ready, target)
    shutil.rmtree(cache, ignore_errors=True)
