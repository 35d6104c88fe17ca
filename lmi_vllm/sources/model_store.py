"""Finds the model directory in the model store.

Only names are read; nothing is fetched, extracted or written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lmi_vllm.sources.archives import is_archive, unpacked_directory, without_archive_ending
from lmi_vllm.sources.local import file_url_path, is_directory, is_file, skip_single_folders

PROPERTIES_NAME: Final = "serving.properties"


@dataclass(frozen=True, slots=True)
class StoreFinding:
    """The content of a store: at most one of `directory`, `archive`, `url` and `problem` is set.

    An archive that has been unpacked has a directory, too.
    """

    directory: Path | None = None
    archive: Path | None = None
    url: str | None = None  # an entry of load_models that is no local directory
    name: str | None = None  # given as `name=url`
    problem: str | None = None

    @property
    def properties_path(self) -> Path | None:
        """The model directory's serving.properties, if it has one."""
        if self.directory is None:
            return None
        path = self.directory / PROPERTIES_NAME
        return path if path.is_file() else None


def search_store(store: Path, load_models: str) -> StoreFinding:
    """The one model that `load_models` chooses; `problem` if there are several."""
    if is_none(load_models):
        return StoreFinding()
    if load_models.strip().upper() == "ALL":
        return _scan(store)
    return _listed([part for part in re.split(r"[\s,]+", load_models) if part])


def is_none(load_models: str) -> bool:
    """Whether `load_models` asks for a server without a model."""
    return load_models.strip().upper() == "NONE"


def _scan(store: Path) -> StoreFinding:
    """The model in `store`: the root itself, or its only child with content."""
    try:
        children = sorted(store.iterdir()) if is_directory(store) else []
    except OSError as error:
        return StoreFinding(problem=f"model_store {store} cannot be read: {error.strerror}")
    if not children:
        return StoreFinding()
    if any(one.name[0] == "." or not (one.is_dir() or is_archive(one.name)) for one in children):
        return StoreFinding(directory=store)
    models = [child for child in children if not child.is_dir() or any(child.iterdir())]
    if len(models) > 1:
        names = ", ".join(child.name for child in models)
        return StoreFinding(
            problem=f"model_store {store} holds several models ({names}); this server serves one "
            f"per process: choose with -m or load_models"
        )
    return _child(models[0]) if models else StoreFinding()


def _child(path: Path) -> StoreFinding:
    """The finding for one entry of the store."""
    if path.is_dir():
        return StoreFinding(directory=skip_single_folders(path))
    return StoreFinding(archive=path, name=without_archive_ending(path.name))


def _listed(entries: list[str]) -> StoreFinding:
    """The finding for an explicit list `[name[:version[:engine[:devices]]]=]url`."""
    if len(entries) != 1:
        return StoreFinding(
            problem=f"load_models names {len(entries)} models ({', '.join(entries)}); this server "
            f"serves one per process"
        )
    match = re.fullmatch(r"(?:([^=/]+)=)?(.+)", entries[0])
    name, url = match.groups() if match else (None, entries[0])
    name = name.split(":")[0] if name else None
    try:
        path = file_url_path(url) or Path(url)
    except ValueError as error:
        return StoreFinding(problem=f"load_models: {error}")
    if is_directory(path):
        return StoreFinding(directory=skip_single_folders(path), name=name)
    if is_file(path) and is_archive(path.name):
        return StoreFinding(archive=path, name=name or without_archive_ending(path.name))
    return StoreFinding(url=url, name=name)


def with_unpacked(finding: StoreFinding, environ: Mapping[str, str]) -> StoreFinding:
    """`finding` with the directory of its archive, if that was unpacked before."""
    if finding.archive is None or finding.directory is not None:
        return finding
    try:
        directory = unpacked_directory(finding.archive, environ)
    except OSError:
        return finding
    return (
        replace(finding, directory=skip_single_folders(directory))
        if directory.is_dir()
        else finding
    )
