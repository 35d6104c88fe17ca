"""An S3 location: parsed, listed and read, and the gate where boto3's errors become ours.

The endpoint, region, profile and keys come from the mapping that is handed in. What boto3 reads
from the real environment only: AWS_CONFIG_FILE, AWS_SHARED_CREDENTIALS_FILE, web identity and
container credential variables, AWS_CA_BUNDLE and the proxy variables.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.sources.storage import InterruptedTransferError, without_secrets

SCHEME: Final = "s3://"
CONNECTIONS: Final = 32
_WRONG_REGION: Final = (
    "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "PermanentRedirect",
)  # fmt: skip
_MISSING: Final = ("404", "NoSuchKey", "NotFound")
_OVERLOADED: Final = (429, 500, 502, 503, 504)
_FORBIDDEN_STATUSES: Final = (401, 403)
# By name, since they live in three packages: what a transfer that broke or was altered ends with.
_BROKEN_TRANSFERS: Final = (
    "FlexibleChecksumError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "RetriesExceededError",
)


class StoreUnreachableError(Exception):
    """The store cannot be asked at all; a cached copy may still do."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object: `name` is its path below the location, `key` the whole key."""

    name: str
    key: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class S3Location:
    """What an s3:// URL names: one archive, or every object whose key starts with `prefix`."""

    url: str
    bucket: str
    prefix: str

    @property
    def is_archive(self) -> bool:
        """Whether it is one object to be extracted."""
        return is_archive(self.prefix)

    @property
    def base(self) -> str:
        """The part of the keys that the names in the local directory leave out."""
        folder, slash, _ = self.prefix.rpartition("/")
        return folder + slash


def parse_location(url: str) -> S3Location:
    """The location that `url` names; a missing `/` is added, a final `*` taken as it is.

    Raises:
        DownloadError: there is no bucket in it.
    """
    url = url.strip()
    bucket, _, key = url.removeprefix(SCHEME).partition("/")
    if not bucket or "*" in bucket:
        raise DownloadError(f"{url!r} names no bucket: write s3://bucket/prefix/")
    if key.endswith("*"):
        key = key.removesuffix("*")
    elif key and not key.endswith("/") and not is_archive(key):
        key += "/"
    return S3Location(url, bucket, key)


def is_unsigned(environ: Mapping[str, str]) -> bool:
    """Whether requests go out without credentials."""
    return environ.get("DJL_TEST_S3_NO_CREDENTIALS", "").lower() == "true"


def request_payer(environ: Mapping[str, str]) -> dict[str, str]:
    """The argument that accepts the costs of a requester-pays bucket (AWS_REQUEST_PAYER)."""
    payer = environ.get("AWS_REQUEST_PAYER", "")
    return {"RequestPayer": payer} if payer else {}


def endpoint_url(environ: Mapping[str, str]) -> str | None:
    """The store's address where it is not AWS's own."""
    return environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None


def region_name(environ: Mapping[str, str]) -> str | None:
    """The region that is set, if any."""
    return environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or None


def open_client(location: S3Location, environ: Mapping[str, str]) -> Any:
    """A boto3 S3 client; nothing is sent yet."""
    import boto3  # noqa: PLC0415
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    options: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": 3},
        "connect_timeout": 10,
        "read_timeout": 60,
        "max_pool_connections": CONNECTIONS,
    }
    if is_unsigned(environ):
        options["signature_version"] = UNSIGNED
    with translating(location, environ):
        session = boto3.Session(
            aws_access_key_id=environ.get("AWS_ACCESS_KEY_ID") or None,
            aws_secret_access_key=environ.get("AWS_SECRET_ACCESS_KEY") or None,
            aws_session_token=environ.get("AWS_SESSION_TOKEN") or None,
            profile_name=environ.get("AWS_PROFILE") or None,
            region_name=region_name(environ),
        )
        return session.client("s3", endpoint_url=endpoint_url(environ), config=Config(**options))


def list_objects(
    client: Any,
    location: S3Location,
    environ: Mapping[str, str],
) -> tuple[StoredObject, ...]:
    """Every object of `location`, folder markers left out; an archive is the only one of its own.

    Raises:
        DownloadError: bucket or archive do not exist, or access is denied.
        StoreUnreachableError: nobody answers.
    """
    payer = request_payer(environ)
    with translating(location, environ):
        if location.is_archive:
            head = client.head_object(Bucket=location.bucket, Key=location.prefix, **payer)
            name = location.prefix.rpartition("/")[2]
            size, etag = int(head["ContentLength"]), str(head["ETag"])
            return (StoredObject(name, location.prefix, size, etag.strip('"')),)
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=location.bucket, Prefix=location.prefix, **payer
        )
        found = [entry for page in pages for entry in page.get("Contents", ())]
    return tuple(
        StoredObject(_name(location, entry["Key"]), entry["Key"], int(entry["Size"]),
                     str(entry["ETag"]).strip('"'))
        for entry in found
        if not entry["Key"].endswith("/")
    )  # fmt: skip


def read_text(location: S3Location, key: str, environ: Mapping[str, str]) -> str | None:
    """The text of one object, None when there is none."""
    client = open_client(location, environ)
    with translating(location, environ):
        try:
            answer = client.get_object(Bucket=location.bucket, Key=key, **request_payer(environ))
        except client.exceptions.NoSuchKey:
            return None
        return bytes(answer["Body"].read()).decode()


def _name(location: S3Location, key: str) -> str:
    name = key.removeprefix(location.base)
    if name.startswith("/") or ".." in name.split("/") or "\n" in name:
        raise DownloadError(f"{location.url} holds the key {key!r}, which is no safe file name")
    return name


@contextmanager
def translating(location: S3Location, environ: Mapping[str, str]) -> Iterator[None]:
    """Raise only our own errors, or `OSError` for the local disk, in the block."""
    from boto3.exceptions import Boto3Error  # noqa: PLC0415
    from botocore import exceptions as botocore  # noqa: PLC0415

    try:
        yield
    except botocore.ClientError as error:
        raise _of_answer(location, environ, error.response) from error
    except (botocore.NoCredentialsError, botocore.CredentialRetrievalError,
            botocore.PartialCredentialsError) as error:  # fmt: skip
        raise StoreUnreachableError(
            f"no usable AWS credentials ({without_secrets(str(error))}): give the role or the "
            "keys, or set DJL_TEST_S3_NO_CREDENTIALS=true for a public bucket"
        ) from error
    except (botocore.ConnectionError, botocore.HTTPClientError) as error:
        raise StoreUnreachableError(without_secrets(str(error))) from error
    except (botocore.BotoCoreError, Boto3Error) as error:
        if type(error).__name__ in _BROKEN_TRANSFERS:
            raise InterruptedTransferError(without_secrets(str(error))) from error
        raise DownloadError(f"{location.url}: {without_secrets(str(error))}") from error


def is_missing(answer: Mapping[str, Any]) -> bool:
    """Whether an error answer says that there is no such object."""
    return str(answer.get("Error", {}).get("Code", "")) in _MISSING


def _of_answer(
    location: S3Location, environ: Mapping[str, str], answer: Mapping[str, Any]
) -> Exception:
    code = str(answer.get("Error", {}).get("Code", ""))
    metadata = answer.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    where = f"bucket {location.bucket} at {endpoint_url(environ) or 'AWS'}"
    if code in _WRONG_REGION:
        actual = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
        return DownloadError(
            f"{location.url}: {where} is not in region {region_name(environ) or '(none set)'}: "
            f"set AWS_REGION={actual or 'to the region of the bucket'}"
        )
    if code == "NoSuchBucket":
        return DownloadError(
            f"{location.url}: {where} does not exist: check the name and AWS_ENDPOINT_URL"
        )
    if code in _MISSING:
        return DownloadError(f"{location.url}: there is no such object in {where}: check the key")
    if status in _OVERLOADED:
        return StoreUnreachableError(f"{where} answered {code or status}")
    if status in _FORBIDDEN_STATUSES:
        return DownloadError(
            f"{location.url}: access to {where} is denied ({code}): the credentials need "
            "s3:ListBucket on the bucket and s3:GetObject below the prefix"
        )
    return DownloadError(f"{location.url}: {where} answered {code or status}")
