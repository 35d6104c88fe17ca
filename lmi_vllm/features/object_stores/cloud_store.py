"""The object stores of Google (`gs://`) and Azure (`az://` and its other forms), by obstore."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores import cloud_transfer
from lmi_vllm.features.object_stores.cloud_bucket import (
    AZURE,
    GOOGLE,
    CloudBucket,
    Provider,
    azure_account,
)
from lmi_vllm.features.object_stores.cloud_urls import AZURE_URLS, GCS_URLS, CloudUrls
from lmi_vllm.features.object_stores.location import check_small, has_md5_of, missing_text
from lmi_vllm.features.object_stores.source import StoreSource
from lmi_vllm.sources.base import (
    InterruptedTransferError,
    ObjectChangedError,
    StoredObject,
    UnreachableError,
)

_UPLOAD_PART_BYTES: Final = 32 << 20
_UPLOADS_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Cloud:
    """One provider: its URLs and its client."""

    urls: CloudUrls
    provider: Provider


class CloudStore:
    """The objects below a URL: one archive, or all whose key starts with its prefix.

    Raises:
        DownloadError: the URL is written in another way, or names no account.
    """

    def __init__(
        self, cloud: Cloud, url: str, environ: Mapping[str, str], bucket: CloudBucket | None = None
    ) -> None:
        self.url = url.strip()
        self._cloud = cloud
        self._environ = environ
        if problem := cloud.urls.problem(self.url):
            raise DownloadError(problem)
        place = cloud.urls.parse(self.url)
        self._location = place.location
        self._bucket = bucket or CloudBucket(place, environ, cloud.provider)
        self.listed_url = self._location.listed_url

    def below(self, folder: str) -> "CloudStore":
        """Return the store of one folder of this prefix, over the same connections."""
        url = f"{self.listed_url}{folder}/"
        return CloudStore(self._cloud, url, self._environ, self._bucket)

    def list_objects(self, most: int | None = None) -> Sequence[StoredObject]:
        """Return every object without folder markers; the URL of an archive has that one only.

        Raises:
            DownloadError: there are more than `most`, markers included; no more pages are read.
        """
        location = self._location
        if location.is_archive:
            if (head := self._head(location.prefix)) is None:
                raise DownloadError(missing_text(self.url, self._bucket.place))
            return (self._stored(head),)
        entries: list[Mapping[str, Any]] = []
        with self._bucket.requests(self.url) as store:
            from obstore import list as pages  # noqa: PLC0415

            # Obstore lists whole folders: the rest of a prefix that ends within a name is ours.
            for page in pages(store, location.prefix.rpartition("/")[0] or None):
                entries += (one for one in page if one["path"].startswith(location.prefix))
                location.check_count(len(entries), most)
        # A marker of a folder lacks the slash that it ends with: it is empty, and a folder.
        folders = {str(parent) for entry in entries for parent in Path(str(entry["path"])).parents}
        return tuple(
            self._stored(entry)
            for entry in sorted(entries, key=lambda entry: str(entry["path"]))
            if entry["size"] or entry["path"] not in folders
        )

    def find(self, name: str) -> StoredObject | None:
        """Return the object of this name; None where there is none."""
        head = self._head(self._key(name))
        return None if head is None else self._stored(head)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None where there is none."""
        return self.read_newer(name, "")[0]

    def read_newer(self, name: str, etag: str) -> tuple[bytes | None, str]:
        """Return content and version; the content is None while unchanged, the other "" if missing.

        The version is an ETag in Azure and a generation in Google's store.
        """
        key = self._key(name)
        with self._bucket.requests(self.url) as store:
            from obstore import get  # noqa: PLC0415

            try:
                answer = get(store, key)
                if (version := _version(answer.meta)) == etag:
                    return None, etag
                check_small(key, self._bucket.place, answer.meta["size"])
                return answer.bytes().to_bytes(), version
            except FileNotFoundError:
                return None, ""

    def write(self, name: str, content: bytes, etag: str | None = None) -> str:
        """Write a small object if the present one has this version; return the new one.

        With "" there must be none yet; with None it is written in any case.

        Raises:
            ObjectChangedError: the condition does not hold.
        """
        key = self._key(name)
        mode: Any = "overwrite" if etag is None else "create"
        if etag:  # each store compares its own
            mode = {"version": etag, "e_tag": f'"{etag}"'}
        with self._bucket.requests(self.url) as store:
            from obstore import put  # noqa: PLC0415
            from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

            try:
                return _version(put(store, key, content, mode=mode, use_multipart=False))
            except (AlreadyExistsError, PreconditionError) as error:
                raise ObjectChangedError(key) from error
            except FileNotFoundError as error:
                if etag:
                    raise ObjectChangedError(key) from error
                raise

    def delete(self, name: str) -> None:
        """Delete the object, if it is there."""
        with self._bucket.requests(self.url) as store:
            from obstore import delete  # noqa: PLC0415

            try:
                delete(store, self._key(name))
            except FileNotFoundError:
                return

    def download(self, objects: Sequence[StoredObject], directory: Path, attempt: int) -> None:
        """Fetch each object into `directory`."""
        smallest_first = sorted(objects, key=lambda stored: stored.size)
        try:
            with self._bucket.requests(self.url) as store:
                cloud_transfer.fetch(store, smallest_first, directory)
        except UnreachableError as error:
            raise InterruptedTransferError(str(error)) from error

    def is_intact(self, stored: StoredObject, path: Path) -> bool:
        """Whether the file has the MD5 of Google's ETag; True where the ETag is no MD5."""
        return has_md5_of(path, stored.etag)

    def upload(self, name: str, path: Path) -> None:
        """Upload the file in parts; it appears whole or not at all."""
        with self._bucket.requests(self.url) as store:
            from obstore import put  # noqa: PLC0415

            put(store, self._key(name), path, chunk_size=_UPLOAD_PART_BYTES,
                max_concurrency=_UPLOADS_AT_ONCE)  # fmt: skip

    def _key(self, name: str) -> str:
        return f"{self._location.prefix}{name}"

    def _head(self, key: str) -> Mapping[str, Any] | None:
        with self._bucket.requests(self.url) as store:
            from obstore import head  # noqa: PLC0415

            try:
                found: Mapping[str, Any] = head(store, key)
            except FileNotFoundError:
                return None
            return found

    def _stored(self, entry: Mapping[str, Any]) -> StoredObject:
        etag, modified = str(entry["e_tag"] or ""), entry["last_modified"].timestamp()
        return self._location.stored(str(entry["path"]), entry["size"], etag, modified)


def _version(entry: Mapping[str, Any]) -> str:
    """What a conditional write compares."""
    return str(entry["version"] or entry["e_tag"] or "").strip('"')


def _lacking_account(url: str, environ: Mapping[str, str]) -> str:
    """Why no storage account is known for a URL of Azure; empty if it is."""
    try:
        azure_account(AZURE_URLS.parse(url), environ)
    except DownloadError as error:
        return str(error)
    return ""


_GOOGLE: Final = Cloud(GCS_URLS, GOOGLE)
_AZURE: Final = Cloud(AZURE_URLS, AZURE)

GCS: Final = StoreSource(
    "gs", partial(CloudStore, _GOOGLE), is_streamed_by_vllm=True, claimed=GCS_URLS.claimed,
    problem_of=GCS_URLS.problem,
)  # fmt: skip
AZ: Final = StoreSource(
    "az", partial(CloudStore, _AZURE), is_streamed_by_vllm=True, problem_of=AZURE_URLS.problem,
    lacking_of=_lacking_account, bucket="container",
)  # fmt: skip
AZURE_LONG: Final = StoreSource(
    "abfss", partial(CloudStore, _AZURE), claimed=AZURE_URLS.claimed,
    problem_of=AZURE_URLS.problem, lacking_of=_lacking_account,
    bucket="container@account.dfs.core.windows.net",
)  # fmt: skip
