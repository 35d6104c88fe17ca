"""The object store of S3 and of services that speak its protocol.

The endpoint, region, profile and keys come from the mapping that is handed in. What boto3 reads
from the real environment only: AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE, web identity and
container credential variables, AWS_CA_BUNDLE and the proxy variables.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores import s3_transfer as transfer
from lmi_vllm.features.object_stores.location import (
    Location,
    check_small,
    has_md5_of,
    missing_text,
)
from lmi_vllm.features.object_stores.s3_bucket import MISSING, S3Bucket, error_code
from lmi_vllm.features.object_stores.source import StoreSource
from lmi_vllm.sources.base import (
    InterruptedTransferError,
    ObjectChangedError,
    StoredObject,
    UnreachableError,
)

_CONFLICTS: Final = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")


class S3Settings(FeatureSettings):
    """The client that transfers objects."""

    # fmt: off
    lmi_s3_client: str = variable(parse.one_of("auto", "s5cmd", "boto3"), "What fetches from S3.",
        default="auto", values="auto, s5cmd, boto3")
    # fmt: on


class S3Store:
    """The objects below an S3 URL: one archive, or all whose key starts with its prefix.

    A missing `/` is added to a prefix, a final `*` is taken as it is.

    Raises:
        DownloadError: there is no bucket in the URL.
    """

    def __init__(
        self, url: str, environ: Mapping[str, str], bucket: S3Bucket | None = None
    ) -> None:
        self.url = url.strip()
        self._environ = environ
        name, _, key = self.url.partition("://")[2].partition("/")
        self._location = Location.of(self.url, name, f"s3://{name}/", key)
        self._bucket = bucket or S3Bucket(name, environ)
        self._prefix = self._location.prefix
        self.listed_url = self._location.listed_url

    def below(self, folder: str) -> "S3Store":
        """Return the store of one folder of this prefix, over the same connections."""
        return S3Store(f"{self.listed_url}{folder}/", self._environ, self._bucket)

    def list_objects(self, most: int | None = None) -> Sequence[StoredObject]:
        """Return every object without folder markers; the URL of an archive has that one only.

        Raises:
            DownloadError: there are more than `most`, markers included; no more pages are read.
        """
        if self._location.is_archive:
            head = self._head(self._prefix)
            if head is None:
                raise DownloadError(missing_text(self.url, self._bucket.place))
            return (head,)
        with self._bucket.requests(self.url) as client:
            pages = client.get_paginator("list_objects_v2").paginate(
                Prefix=self._prefix, **self._bucket.arguments
            )
            entries: list[Mapping[str, Any]] = []
            for page in pages:
                entries += page.get("Contents", ())
                self._location.check_count(len(entries), most)
        return tuple(
            self._location.stored(
                entry["Key"], entry["Size"], entry["ETag"], entry["LastModified"].timestamp()
            )
            for entry in entries
            if not entry["Key"].endswith("/")
        )

    def find(self, name: str) -> StoredObject | None:
        """Return the object of this name; None where there is none."""
        return self._head(f"{self._prefix}{name}")

    def read(self, name: str) -> bytes | None:
        """Return the content of a small object; None where there is none."""
        return self.read_newer(name, "")[0]

    def read_newer(self, name: str, etag: str) -> tuple[bytes | None, str]:
        """Return content and ETag; the content is None while unchanged, the ETag "" if missing."""
        known = {"IfNoneMatch": f'"{etag}"'} if etag else {}
        key = f"{self._prefix}{name}"
        with self._bucket.requests(self.url) as client:
            try:
                response = client.get_object(Key=key, **known, **self._bucket.arguments)
            except client.exceptions.ClientError as error:
                if error_code(error.response) in ("304", "NotModified"):
                    return None, etag
                if error_code(error.response) in MISSING:
                    return None, ""
                raise
            return self._content(response, key), str(response["ETag"]).strip('"')

    def write(self, name: str, content: bytes, etag: str | None = None) -> str:
        """Write a small object if the present one has this ETag; return the new ETag.

        With "" there must be none yet; with None it is written in any case.

        Raises:
            ObjectChangedError: the condition does not hold.
        """
        condition = (
            {} if etag is None else {"IfMatch": f'"{etag}"'} if etag else {"IfNoneMatch": "*"}
        )
        key = f"{self._prefix}{name}"
        with self._bucket.requests(self.url) as client:
            try:
                response = client.put_object(
                    Key=key, Body=content, **condition, **self._bucket.arguments
                )
            except client.exceptions.ClientError as error:
                if condition and error_code(error.response) in (*_CONFLICTS, *MISSING):
                    raise ObjectChangedError(key) from error
                raise
        return str(response["ETag"]).strip('"')

    def delete(self, name: str) -> None:
        """Delete the object, if it is there."""
        with self._bucket.requests(self.url) as client:
            client.delete_object(Key=f"{self._prefix}{name}", **self._bucket.arguments)

    def download(self, objects: Sequence[StoredObject], directory: Path, attempt: int) -> None:
        """Fetch each object into `directory`: by s5cmd where it is installed, else by boto3."""
        s5cmd = transfer.s5cmd_for(self._environ, attempt)
        smallest_first = sorted(objects, key=lambda stored: stored.size)
        if s5cmd is not None:
            transfer.run_s5cmd(s5cmd, self._environ, self._bucket.name, smallest_first, directory)
            return
        try:
            with self._bucket.requests(self.url) as client:
                transfer.run_boto3(
                    client, self._environ, self._bucket.name, smallest_first, directory
                )
        except UnreachableError as error:
            raise InterruptedTransferError(str(error)) from error

    def is_intact(self, stored: StoredObject, path: Path) -> bool:
        """Whether the file has the MD5 of the ETag; True where the ETag is no MD5."""
        return has_md5_of(path, stored.etag) or self._is_etag_encrypted(stored)

    def _is_etag_encrypted(self, stored: StoredObject) -> bool:
        """Whether the store encrypted with a key of its own, which changes the ETag."""
        with self._bucket.requests(self.url) as client:
            head = client.head_object(Key=stored.key, **self._bucket.arguments)
        encryption = str(head.get("ServerSideEncryption", ""))
        return encryption.startswith("aws:kms") or "SSECustomerAlgorithm" in head

    def upload(self, name: str, path: Path) -> None:
        """Upload the file in one PUT: it appears whole or not at all, and leaves no parts."""
        key = f"{self._prefix}{name}"
        with path.open("rb") as body, self._bucket.requests(self.url) as client:
            client.put_object(Key=key, Body=body, **self._bucket.arguments)

    def _content(self, response: Mapping[str, Any], key: str) -> bytes:
        with response["Body"] as body:
            check_small(key, self._bucket.place, int(self._stated(response, "ContentLength")))
            return bytes(body.read())

    def _head(self, key: str) -> StoredObject | None:
        with self._bucket.requests(self.url) as client:
            try:
                head = client.head_object(Key=key, **self._bucket.arguments)
            except client.exceptions.ClientError as error:
                if error_code(error.response) in MISSING:
                    return None
                raise
        size, etag = (self._stated(head, name) for name in ("ContentLength", "ETag"))
        return self._location.stored(key, size, etag)

    def _stated(self, response: Mapping[str, Any], name: str) -> Any:
        """Return what every answer of S3 states.

        Raises:
            DownloadError: this one does not.
        """
        if name not in response:
            raise DownloadError(
                f"{self._bucket.place}: the answer has no {name}, so it is not from S3: is a proxy "
                "or a login page in the way?"
            )
        return response[name]


S3: Final = StoreSource("s3", S3Store, is_streamed_by_vllm=True)
