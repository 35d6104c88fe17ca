"""The record kept beside fetched files: what the store held, so that a change is noticed later."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lmi_vllm.sources.s3.store import StoredObject

MANIFEST_NAME: Final = ".lmi-fetch.json"


@dataclass(frozen=True, slots=True)
class FetchManifest:
    """What was fetched (`objects`: name -> size and ETag) and the files it became, with sizes."""

    source: str
    objects: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Save it in `directory`, whole or not at all."""
        record = {"source": self.source, "objects": self.objects, "files": self.files}
        temporary = directory / f"{MANIFEST_NAME}.new"
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(directory / MANIFEST_NAME)

    def is_on_disk(self, directory: Path) -> bool:
        """Whether every file is in `directory` with its size."""
        return all(has_size(directory / name, size) for name, size in self.files.items())


def manifest_of(source: str, objects: Sequence[StoredObject]) -> FetchManifest:
    """The manifest of a directory that holds `objects` as they are."""
    return FetchManifest(
        source,
        {stored.name: (stored.size, stored.etag) for stored in objects},
        {stored.name: stored.size for stored in objects},
    )


def read_manifest(directory: Path) -> FetchManifest | None:
    """The manifest in `directory`, None when there is none that can be read."""
    try:
        record = json.loads((directory / MANIFEST_NAME).read_bytes())
        objects = {name: (int(size), str(etag)) for name, (size, etag) in record["objects"].items()}
        return FetchManifest(str(record["source"]), objects, dict(record["files"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def has_size(path: Path, size: int) -> bool:
    """Whether `path` is a file of `size` bytes."""
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False
