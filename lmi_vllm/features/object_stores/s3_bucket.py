"""The client of one bucket, which translates boto3's errors into those of sources."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores import s3_transfer as transfer
from lmi_vllm.features.object_stores.location import missing_text
from lmi_vllm.features.transfer import without_secrets
from lmi_vllm.sources.base import InterruptedTransferError, NothingThereError, UnreachableError

_WRONG_REGION: Final = (
    "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "PermanentRedirect",
)  # fmt: skip
MISSING: Final = ("404", "NoSuchKey", "NotFound")
_TRANSIENT_STATUSES: Final = (429, 500, 502, 503, 504)
_FORBIDDEN_STATUSES: Final = (401, 403)
# By name, since they live in three packages: what a transfer that broke or was altered ends with.
_BROKEN_TRANSFERS: Final = (
    "FlexibleChecksumError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "RetriesExceededError",
)


class S3Bucket:
    """The client of one bucket, and the translation of its errors."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self.name = name
        self._environ = environ

    @cached_property
    def client(self) -> Any:
        """The boto3 client, made at first use; making it sends no request."""
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

    @property
    def arguments(self) -> Mapping[str, str]:
        """The arguments of every request: the bucket, and the payer of a requester-pays bucket."""
        return {"Bucket": self.name, **transfer.request_payer(self._environ)}

    @property
    def place(self) -> str:
        """The bucket and its store, for messages."""
        return f"bucket {self.name} at {transfer.endpoint_url(self._environ) or 'AWS'}"

    @contextmanager
    def requests(self, url: str) -> Iterator[Any]:
        """Yield the client; the block raises our own errors, which name `url`, or `OSError`."""
        from boto3.exceptions import Boto3Error  # noqa: PLC0415
        from botocore import exceptions as botocore  # noqa: PLC0415
        from s3transfer.exceptions import RetriesExceededError  # noqa: PLC0415

        try:
            yield self.client
        except botocore.ClientError as error:
            raise self._error_of_response(url, error.response) from error
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
            raise DownloadError(f"{url}: {without_secrets(str(error))}") from error

    def _error_of_response(self, url: str, response: Mapping[str, Any]) -> Exception:
        code, where = error_code(response), self.place
        metadata = response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        if code in _WRONG_REGION:
            actual = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
            region = transfer.region_name(self._environ) or "(none set)"
            return DownloadError(
                f"{url}: {where} is not in region {region}: "
                f"set AWS_REGION={actual or 'to the region of the bucket'}"
            )
        if code == "NoSuchBucket":
            return NothingThereError(
                f"{url}: {where} does not exist: check the name and AWS_ENDPOINT_URL"
            )
        if code in MISSING:
            return DownloadError(missing_text(url, where))
        if status in _TRANSIENT_STATUSES:
            return UnreachableError(f"{where} answered {code or status}")
        if status in _FORBIDDEN_STATUSES:
            return DownloadError(
                f"{url}: access to {where} is denied ({code}): the credentials need "
                "s3:ListBucket on the bucket and s3:GetObject below the prefix"
            )
        return DownloadError(f"{url}: {where} answered {code or status}")


def error_code(response: Mapping[str, Any]) -> str:
    """Return S3's error code of a response; empty where it has none."""
    return str(response.get("Error", {}).get("Code", ""))
