"""One cache entry as one archive: what a start compiled, and as last member a manifest.

A truncated archive has no manifest, an altered one does not match its digests, and one of another
key has that key in it: none of them is used.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.extract import extract_archive

FORMAT: Final = 1
SUFFIX: Final = ".tar.gz"
MANIFEST: Final = "manifest.json"
# A hundred times the largest entry seen; every start reads one, so its growth is bounded.
LIMITS: Final = Limits(files=200_000, total_bytes=4 << 30)
_COMPRESSION: Final = 1  # the fastest level: time counts more than size
# Not compiled code: images of examples, the GPU topology of this machine, temporary files.
_EXCLUDED: Final = (
    "assets", "gpu_p2p_access_cache_*", "*.lock", "locks", "*.tmp",
    f"{MANIFEST}.*",
)  # fmt: skip
# vLLM names each child of these by a hash of its inputs, so a new name is newly compiled.
_NAMED_BY_HASH: Final = (
    "vllm/torch_compile_cache", "vllm/torch_compile_cache/torch_aot_compile", "vllm/modelinfos",
)  # fmt: skip


class UnusableEntryError(Exception):
    """An entry that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of an entry: its files with size in bytes and SHA-256, its key and key parts."""

    key: str
    parts: Mapping[str, object]
    files: Mapping[str, tuple[int, str]]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, unpacked."""
        return sum(size for size, _ in self.files.values())

    @property
    def caches(self) -> frozenset[str]:
        """The caches in it, as the folders that vLLM names by hash."""
        return caches_of(self.files)

    def encoded(self) -> bytes:
        """Return the manifest as stored: JSON in UTF-8."""
        record = {
            "format": FORMAT, "key": self.key, "parts": dict(self.parts), "files": dict(self.files),
        }  # fmt: skip
        return json.dumps(record, indent=1, default=_plain).encode()


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def caches_of(names: Mapping[str, object]) -> frozenset[str]:
    """Return the caches that the files of these names belong to."""
    names_of_caches = set()
    for name in names:
        for parent in _NAMED_BY_HASH:
            if name.startswith(f"{parent}/"):
                names_of_caches.add(f"{parent}/{name[len(parent) + 1 :].split('/', 1)[0]}")
    return frozenset(names_of_caches.difference(_NAMED_BY_HASH))


def files_in(folder: Path) -> dict[str, Path]:
    """Return the path by relative name of each file that an entry takes; links are left out."""
    return dict(_walk(folder, ""))


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    with suppress(FileNotFoundError):  # vLLM removes files meanwhile
        for path in sorted(folder.iterdir()):
            if path.is_symlink() or any(path.match(pattern) for pattern in _EXCLUDED):
                continue
            name = f"{prefix}{path.name}"
            if path.is_dir():
                yield from _walk(path, f"{name}/")
            elif path.is_file() and name != MANIFEST:
                yield name, path


def pack(
    folder: Path,
    archive: Path,
    key: str,
    parts: Mapping[str, object],
    limits: Limits = LIMITS,
) -> Manifest:
    """Write what `folder` holds to `archive` and return the manifest, which is its last member.

    Raises:
        UnusableEntryError: the folder is larger than an entry may be.
        OSError: it cannot be read, or there is no room.
    """
    found = files_in(folder)
    total = sum(path.stat().st_size for path in found.values())
    if len(found) >= limits.files or total > limits.total_bytes:
        raise UnusableEntryError(
            f"{len(found)} files of {total >> 20} MiB are more than an entry may hold "
            f"({limits.files} files, {limits.total_bytes >> 20} MiB)"
        )
    with tarfile.open(archive, "w:gz", compresslevel=_COMPRESSION) as tar:
        files = {name: _add(tar, name, path) for name, path in found.items()}
        manifest = Manifest(key, parts, files)
        body = manifest.encoded()
        tar.addfile(_member(MANIFEST, len(body)), io.BytesIO(body))
    return manifest


def _add(tar: tarfile.TarFile, name: str, path: Path) -> tuple[int, str]:
    """Add one file as it was when opened, also if vLLM replaces it; return size and SHA-256."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _HashingReader(file)
        tar.addfile(_member(name, size), reader)
    return size, reader.digest.hexdigest()


class _HashingReader(io.RawIOBase):
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        body = self._file.read(size)
        self.digest.update(body)
        return body


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


def unpack(archive: Path, folder: Path, key: str, source: str, limits: Limits = LIMITS) -> Manifest:
    """Unpack an entry into the new `folder`, verify every file, and return its manifest.

    Raises:
        UnusableEntryError: it is damaged, cut short, too large, unsafe, or another key's.
    """
    if archive.stat().st_size > limits.total_bytes:
        raise UnusableEntryError("it is larger than an entry may be")
    try:
        sizes = extract_archive(archive, folder, source, limits)
    except DownloadError as error:
        raise UnusableEntryError(error.text) from error
    manifest = read_manifest(folder)
    if manifest is None:
        raise UnusableEntryError("it has no manifest: it was cut short, or is no cache of ours")
    if manifest.key != key:
        raise UnusableEntryError(f"it was made for key {manifest.key}, and this start has {key}")
    if set(sizes) != {*manifest.files, MANIFEST}:
        raise UnusableEntryError("it does not hold the files that its manifest names")
    for name, (size, digest) in manifest.files.items():
        if sizes[name] != size or _digest(folder / name) != digest:
            raise UnusableEntryError(f"{name} in it is not what its manifest says")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of what was restored or saved in `folder`; None where neither was."""
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
        if record["format"] != FORMAT:
            return None
        files = {
            str(name): (int(size), str(digest)) for name, (size, digest) in record["files"].items()
        }
        return Manifest(str(record["key"]), dict(record["parts"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def move_in(ready: Path, place: Path) -> None:
    """Move every file of `ready` into `place`, the manifest last; `place` may be in use."""
    for name, path in files_in(ready).items():
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    (ready / MANIFEST).replace(place / MANIFEST)
    shutil.rmtree(ready, ignore_errors=True)


def write_manifest(manifest: Manifest, place: Path) -> None:
    """Write the manifest of what the store holds into `place`, atomically."""
    temporary = place / f"{MANIFEST}.new"
    temporary.write_bytes(manifest.encoded())
    temporary.replace(place / MANIFEST)
