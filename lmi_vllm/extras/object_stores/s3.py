"""S3 and what speaks its protocol, and the gate where boto3's errors become ours.

The endpoint, region, profile and keys come from the mapping that is handed in. What boto3 reads
from the real environment only: AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE, web identity and
container credential variables, AWS_CA_BUNDLE and the proxy variables.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import variable
from lmi_vllm.config.settings import ExtraSettings
from lmi_vllm.errors import DownloadError
from lmi_vllm.extras.object_stores import s3_transfer as transfer
from lmi_vllm.extras.object_stores.source import StoreSource
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.sources.base import (
    InterruptedTransferError,
    ObjectChangedError,
    StoredObject,
    UnreachableError,
)
from lmi_vllm.sources.storage import without_secrets

_WRONG_REGION: Final = (
    "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "PermanentRedirect",
)  # fmt: skip
_MISSING: Final = ("404", "NoSuchKey", "NotFound")
_CONFLICTS: Final = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")
_OVERLOADED: Final = (429, 500, 502, 503, 504)
_FORBIDDEN_STATUSES: Final = (401, 403)
# By name, since they live in three packages: what a transfer that broke or was altered ends with.
_BROKEN_TRANSFERS: Final = (
    "FlexibleChecksumError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "RetriesExceededError",
)
_MD5_HEX: Final = re.compile("[0-9a-f]{32}")


class S3Settings(ExtraSettings):
    """What moves the bytes."""

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

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self.url = url.strip()
        self._environ = environ
        self._bucket, _, key = self.url.partition("://")[2].partition("/")
        if not self._bucket or "*" in self._bucket:
            raise DownloadError(f"{self.url!r} names no bucket: write s3://bucket/prefix/")
        self._is_archive = is_archive(key)
        needs_slash = key and not key.endswith(("/", "*")) and not self._is_archive
        self._prefix = f"{key}/" if needs_slash else key.removesuffix("*")
        self.listed_url = f"s3://{self._bucket}/{self._prefix}"

    @cached_property
    def _client(self) -> Any:
        """A boto3 client; nothing is sent yet."""
        import boto3  # noqa: PLC0415
        from botocore import UNSIGNED  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        environ = self._environ
        options: dict[str, Any] = {
            "retries": {"mode": "standard", "total_max_attempts": 3},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": transfer.CONNECTIONS,
        }
        if transfer.is_unsigned(environ):
            options["signature_version"] = UNSIGNED
        session = boto3.Session(
            aws_access_key_id=environ.get("AWS_ACCESS_KEY_ID") or None,
            aws_secret_access_key=environ.get("AWS_SECRET_ACCESS_KEY") or None,
            aws_session_token=environ.get("AWS_SESSION_TOKEN") or None,
            profile_name=environ.get("AWS_PROFILE") or None,
            region_name=transfer.region_name(environ),
        )
        endpoint = transfer.endpoint_url(environ)
        return session.client("s3", endpoint_url=endpoint, config=Config(**options))

    def below(self, folder: str) -> "S3Store":
        """The objects of one folder of this prefix, over the same connections."""
        store = S3Store(f"{self.listed_url}{folder}/", self._environ)
        store.__dict__["_client"] = self._client
        return store

    def list_objects(self, most: int | None = None) -> Sequence[StoredObject]:
        """Every object, folder markers left out; an archive is the only one of its own.

        Raises:
            DownloadError: there are more than `most`, markers included; no more pages are read.
        """
        if self._is_archive:
            found = self._head(self._prefix)
            if found is None:
                raise DownloadError(
                    f"{self.url}: there is no such object in {self._where}: check the key"
                )
            return (found,)
        with self._translating():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix, **self._payer
            )
            entries: list[Mapping[str, Any]] = []
            for page in pages:
                entries += page.get("Contents", ())
                if most is not None and len(entries) > most:
                    raise DownloadError(
                        f"{self.url} holds more than {most} objects, folders included: too many"
                    )
        return tuple(
            replace(
                self._stored(entry["Key"], entry["Size"], entry["ETag"]),
                modified=entry["LastModified"].timestamp(),
            )
            for entry in entries
            if not entry["Key"].endswith("/")
        )

    def find(self, name: str) -> StoredObject | None:
        """The object of this name; None where there is none."""
        return self._head(f"{self._prefix}{name}")

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""
        key = f"{self._prefix}{name}"
        with self._translating():
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=key, **self._payer)
            except self._client.exceptions.NoSuchKey:
                return None
            return bytes(answer["Body"].read())

    def read_newer(self, name: str, etag: str) -> tuple[bytes | None, str]:
        """The content and ETag of a small object; None while it has this ETag, "" without one."""
        known = {"IfNoneMatch": f'"{etag}"'} if etag else {}
        key = f"{self._prefix}{name}"
        with self._translating():
            try:
                answer = self._client.get_object(
                    Bucket=self._bucket, Key=key, **known, **self._payer
                )
            except self._client.exceptions.ClientError as error:
                if _code(error.response) in ("304", "NotModified"):
                    return None, etag
                if _code(error.response) in _MISSING:
                    return None, ""
                raise
            return bytes(answer["Body"].read()), str(answer["ETag"]).strip('"')

    def write(self, name: str, content: bytes, etag: str | None = None) -> str:
        """Put a small object in the place of the one with this ETag, and return its own."""
        condition = (
            {} if etag is None else {"IfMatch": f'"{etag}"'} if etag else {"IfNoneMatch": "*"}
        )
        key = f"{self._prefix}{name}"
        with self._translating():
            try:
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=key, Body=content, **condition, **self._payer
                )
            except self._client.exceptions.ClientError as error:
                if condition and _code(error.response) in (*_CONFLICTS, *_MISSING):
                    raise ObjectChangedError(key) from error
                raise
        return str(answer["ETag"]).strip('"')

    def delete(self, name: str) -> None:
        """Remove the object, if it is there."""
        with self._translating():
            self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}{name}")

    def download(self, objects: Sequence[StoredObject], directory: Path, attempt: int) -> None:
        """Put each object into `directory`, by s5cmd first where that is here."""
        s5cmd = transfer.s5cmd_for(self._environ, attempt)
        smallest_first = sorted(objects, key=lambda stored: stored.size)
        if s5cmd is not None:
            transfer.run_s5cmd(s5cmd, self._environ, self._bucket, smallest_first, directory)
            return
        try:
            with self._translating():
                transfer.run_boto3(
                    self._client, self._environ, self._bucket, smallest_first, directory
                )
        except UnreachableError as error:
            raise InterruptedTransferError(str(error)) from error

    def is_intact(self, stored: StoredObject, path: Path) -> bool:
        """Whether the MD5 is right, where the ETag is one."""
        if not _MD5_HEX.fullmatch(stored.etag):
            return True
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        return digest.hexdigest() == stored.etag or self._is_etag_encrypted(stored)

    def _is_etag_encrypted(self, stored: StoredObject) -> bool:
        """Whether the store encrypted with a key of its own, which changes the ETag."""
        with self._translating():
            head = self._client.head_object(Bucket=self._bucket, Key=stored.key, **self._payer)
        encryption = str(head.get("ServerSideEncryption", ""))
        return encryption.startswith("aws:kms") or "SSECustomerAlgorithm" in head

    def upload(self, name: str, path: Path) -> None:
        """Keep the file under `name`: one PUT, seen whole or not at all, leaving no parts."""
        key = f"{self._prefix}{name}"
        with path.open("rb") as body, self._translating():
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body, **self._payer)

    @property
    def _payer(self) -> Mapping[str, str]:
        return transfer.request_payer(self._environ)

    @property
    def _where(self) -> str:
        return f"bucket {self._bucket} at {transfer.endpoint_url(self._environ) or 'AWS'}"

    def _head(self, key: str) -> StoredObject | None:
        with self._translating():
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=key, **self._payer)
            except self._client.exceptions.ClientError as error:
                if _code(error.response) in _MISSING:
                    return None
                raise
        return self._stored(key, head["ContentLength"], head["ETag"])

    def _stored(self, key: str, size: int, etag: str) -> StoredObject:
        """The object as it will be named in the local directory."""
        folder, slash, _ = self._prefix.rpartition("/")
        name = key.removeprefix(f"{folder}{slash}")
        if name.startswith("/") or ".." in name.split("/") or "\n" in name:
            raise DownloadError(f"{self.url} holds the key {key!r}, which is no safe file name")
        return StoredObject(name, key, int(size), str(etag).strip('"'))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """Raise only our own errors, or `OSError` for the local disk, in the block."""
        from boto3.exceptions import Boto3Error  # noqa: PLC0415
        from botocore import exceptions as botocore  # noqa: PLC0415
        from s3transfer.exceptions import RetriesExceededError  # noqa: PLC0415

        try:
            yield
        except botocore.ClientError as error:
            raise self._of_answer(error.response) from error
        except (botocore.NoCredentialsError, botocore.CredentialRetrievalError,
                botocore.PartialCredentialsError) as error:  # fmt: skip
            raise UnreachableError(
                f"no usable AWS credentials ({without_secrets(str(error))}): give the role or the "
                "keys, or set DJL_TEST_S3_NO_CREDENTIALS=true for a public bucket"
            ) from error
        except (botocore.ConnectionError, botocore.HTTPClientError) as error:
            raise UnreachableError(without_secrets(str(error))) from error
        except RetriesExceededError as error:  # of the library below boto3, an error of its own
            raise InterruptedTransferError(without_secrets(str(error))) from error
        except (botocore.BotoCoreError, Boto3Error) as error:
            if type(error).__name__ in _BROKEN_TRANSFERS:
                raise InterruptedTransferError(without_secrets(str(error))) from error
            raise DownloadError(f"{self.url}: {without_secrets(str(error))}") from error

    def _of_answer(self, answer: Mapping[str, Any]) -> Exception:
        code, where = _code(answer), self._where
        metadata = answer.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        if code in _WRONG_REGION:
            actual = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            region = transfer.region_name(self._environ) or "(none set)"
            return DownloadError(
                f"{self.url}: {where} is not in region {region}: "
                f"set AWS_REGION={actual or 'to the region of the bucket'}"
            )
        if code == "NoSuchBucket":
            return DownloadError(
                f"{self.url}: {where} does not exist: check the name and AWS_ENDPOINT_URL"
            )
        if code in _MISSING:
            return DownloadError(f"{self.url}: there is no such object in {where}: check the key")
        if status in _OVERLOADED:
            return UnreachableError(f"{where} answered {code or status}")
        if status in _FORBIDDEN_STATUSES:
            return DownloadError(
                f"{self.url}: access to {where} is denied ({code}): the credentials need "
                "s3:ListBucket on the bucket and s3:GetObject below the prefix"
            )
        return DownloadError(f"{self.url}: {where} answered {code or status}")


def _code(answer: Mapping[str, Any]) -> str:
    return str(answer.get("Error", {}).get("Code", ""))


S3: Final = StoreSource("s3", S3Store, is_streamed_by_vllm=True)
