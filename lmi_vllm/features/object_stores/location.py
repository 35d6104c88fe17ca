"""What a URL of an object store names: one archive, or all objects below a prefix."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from lmi_vllm.errors import DownloadError, TooManyObjectsError
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.sources.base import StoredObject

MAX_SMALL_BYTES: Final = 64 << 20  # of an object that is read into memory: 300,000 shared adapters
_MD5_HEX: Final = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a bucket. `root` is the URL of the bucket, with a final slash."""

    url: str
    bucket: str
    root: str
    prefix: str
    is_archive: bool

    @classmethod
    def of(cls, url: str, bucket: str, root: str, key: str) -> Self:
        """The place of `key`: a missing `/` is added to a prefix, a final `*` taken as it is.

        Raises:
            DownloadError: there is no bucket in the URL.
        """
        if not bucket or "*" in bucket:
            scheme = url.partition("://")[0]
            raise DownloadError(f"{url!r} names no bucket: write {scheme}://bucket/prefix/")
        needs_slash = key and not key.endswith(("/", "*")) and not is_archive(key)
        prefix = f"{key}/" if needs_slash else key.removesuffix("*")
        return cls(url, bucket, root, prefix, is_archive(key))

    @property
    def listed_url(self) -> str:
        """The listed prefix: with a final slash, without a star."""
        return f"{self.root}{self.prefix}"

    def stored(self, key: str, size: int, etag: str, modified: float = 0.0) -> StoredObject:
        """The object, named as it will be in the local directory.

        Raises:
            DownloadError: its key would leave the directory.
        """
        folder, slash, _ = self.prefix.rpartition("/")
        name = key.removeprefix(f"{folder}{slash}")
        if name.startswith("/") or ".." in name.split("/") or "\n" in name:
            raise DownloadError(f"{self.url} holds the key {key!r}, which is no safe file name")
        return StoredObject(name, key, int(size), etag.strip('"'), modified)

    def check_count(self, count: int, most: int | None) -> None:
        """Refuse more than `most` objects.

        Raises:
            TooManyObjectsError: there are more.
        """
        if most is not None and count > most:
            raise TooManyObjectsError(
                f"{self.url} holds more than {most} objects, folders included: too many"
            )


def check_small(key: str, place: str, size: int) -> None:
    """Refuse to read a large object into memory.

    Raises:
        DownloadError: it is larger.
    """
    if size > MAX_SMALL_BYTES:
        raise DownloadError(
            f"{key} in {place} has {size} bytes; at most {MAX_SMALL_BYTES} are read: check the key"
        )


def missing_text(url: str, place: str) -> str:
    """The error about an object that is not there."""
    return f"{url}: there is no such object in {place}: check the key"


def has_md5_of(path: Path, etag: str) -> bool:
    """Whether the file has the MD5 of the ETag; True where the ETag is no MD5."""
    if not _MD5_HEX.fullmatch(etag):
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == etag
