"""The client of one bucket or container by obstore, which translates its errors.

Credentials come from the variables below, or from where obstore looks for them by itself: the
machine's identity (metadata servers), federated tokens, and what gcloud has stored.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores.cloud_urls import CloudPlace
from lmi_vllm.features.object_stores.location import missing_text
from lmi_vllm.features.transfer import without_secrets
from lmi_vllm.sources.base import InterruptedTransferError, NothingThereError, UnreachableError

CONNECT_SECONDS: Final = 10
SILENT_SECONDS: Final = 60.0  # of a store that sends nothing
RETRY_SECONDS: Final = 90.0  # after which nothing is tried again: a silent store is asked twice
MAX_RETRIES: Final = 4
_SHOWN_CHARACTERS: Final = 300
_TRANSIENT_STATUSES: Final = (408, 429, 500, 502, 503, 504)
_FORBIDDEN_STATUSES: Final = (401, 403)
_OF_CREDENTIALS: Final = ("token request", "redential", "Invalid Access Key")
_MISSING_BUCKETS: Final = ("NoSuchBucket", "ContainerNotFound")
_GOOGLE: Final = (
    "application_credentials", "service_account", "service_account_path", "service_account_key",
    "bearer_token", "base_url", "skip_signature",
)  # fmt: skip
_AZURE_STORAGE: Final = (
    "account_key", "access_key", "sas_token", "sas_key", "token", "client_id", "client_secret",
    "tenant_id", "authority_host", "endpoint", "use_emulator",
)  # fmt: skip
_AZURE: Final = (
    "client_id", "client_secret", "tenant_id", "authority_host", "federated_token_file",
    "msi_endpoint", "identity_endpoint", "object_id", "msi_resource_id", "use_azure_cli",
    "credential_type", "skip_signature",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Provider:
    """What differs between the providers."""

    open: Callable[[CloudPlace, Mapping[str, str], Mapping[str, Any]], Any]
    where: Callable[[CloudPlace, Mapping[str, str]], str]
    credentials: str  # what to do without any
    rights: str


class CloudBucket:
    """The client of one bucket, and the translation of its errors."""

    def __init__(self, place: CloudPlace, environ: Mapping[str, str], provider: Provider) -> None:
        self._place = place
        self._environ = environ
        self._provider = provider

    @cached_property
    def store(self) -> Any:
        """Obstore's store, made at first use; making it sends no request."""
        seconds = timedelta(seconds=1)
        options = {
            "client_options": {
                # A range of a large file may take long; one that stops is seen by the second.
                "timeout": 3600 * seconds,
                "read_timeout": SILENT_SECONDS * seconds,
                "connect_timeout": CONNECT_SECONDS * seconds,
                "allow_http": True,  # where the endpoint that is set has that scheme
            },
            "retry_config": {
                "max_retries": MAX_RETRIES,
                "retry_timeout": RETRY_SECONDS * seconds,
                "backoff": {
                    "init_backoff": 0.2 * seconds, "max_backoff": 8 * seconds, "base": 2,
                },
            },
        }  # fmt: skip
        return self._provider.open(self._place, self._environ, options)

    @property
    def place(self) -> str:
        """The bucket and its store, for messages."""
        return self._provider.where(self._place, self._environ)

    @contextmanager
    def requests(self, url: str) -> Iterator[Any]:
        """Yield the store; the block raises our own errors, which name `url`, or `OSError`."""
        from obstore.exceptions import BaseError  # noqa: PLC0415

        try:
            yield self.store
        except (BaseError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) and error.errno is not None:
                raise  # of the disk; obstore's has no number
            raise self._translated(url, error) from error

    def _translated(self, url: str, error: Exception) -> Exception:
        text, where = str(error), self.place
        code, status = _found(r"<Code>(\w+)</Code>", text), _found(r"status code: (\d{3})", text)
        if any(word in text for word in _OF_CREDENTIALS):
            advice = self._provider.credentials
            return UnreachableError(f"no usable credentials for {where} ({_short(text)}): {advice}")
        if code in _MISSING_BUCKETS or (status == "404" and "list request" in text):
            return NothingThereError(f"{url}: {where} does not exist: check the name")
        if isinstance(error, FileNotFoundError):
            return DownloadError(missing_text(url, where))
        if type(error).__name__ == "PreconditionError":
            return DownloadError(f"{url} has changed while it was fetched: start again")
        if status:
            return self._of_status(url, int(status), code or status)
        return _of_connection(where, text) if "HTTP error" in text else _unknown(url, text)

    def _of_status(self, url: str, status: int, shown: str) -> Exception:
        if status in _TRANSIENT_STATUSES:
            return UnreachableError(f"{self.place} answered {shown}")
        if status in _FORBIDDEN_STATUSES:
            return DownloadError(
                f"{url}: access to {self.place} is denied ({shown}): the credentials need "
                f"{self._provider.rights}"
            )
        return DownloadError(f"{url}: {self.place} answered {shown}")


def _unknown(url: str, text: str) -> Exception:
    return DownloadError(f"{url}: {_short(text)}")


def _of_connection(where: str, text: str) -> Exception:
    """The error of a connection that failed: before an answer, or in the middle of a body."""
    if "TimedOut" in text or "timed out" in text:
        return UnreachableError(f"{where} has sent nothing for {SILENT_SECONDS:g} s")
    if "error sending request" not in text:
        return InterruptedTransferError(f"{where} broke off: {_short(text)}")
    return UnreachableError(f"{where} cannot be reached: {_short(text)}")


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _short(text: str) -> str:
    """The first line, without what obstore adds about its retries, and without secrets."""
    line = re.sub(r" in [\d.]+\s?[µmn]?s\b|, max_retries: \d+, retry_timeout: \S+", "", text)
    return without_secrets(line)[:_SHOWN_CHARACTERS].rstrip()


def _variables(environ: Mapping[str, str], prefix: str, names: tuple[str, ...]) -> dict[str, str]:
    """Obstore's settings from variables; it reads the process's own environment by itself."""
    keys = (f"{prefix}{name}" for name in names)
    return {key: value for key in keys if (value := environ.get(key.upper(), ""))}


def _open_gcs(place: CloudPlace, environ: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    from obstore.store import GCSStore  # noqa: PLC0415

    config: Any = _variables(environ, "google_", _GOOGLE)
    return GCSStore(place.location.bucket, config=config, **options)


def _open_azure(place: CloudPlace, environ: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    from obstore.store import AzureStore  # noqa: PLC0415

    config: Any = _variables(environ, "azure_storage_", _AZURE_STORAGE)
    config |= _variables(environ, "azure_", _AZURE)
    config["azure_storage_account_name"] = azure_account(place, environ)
    if place.account and "azure_storage_endpoint" not in config:
        config["azure_storage_endpoint"] = f"https://{place.account}.blob.{place.cloud}"
    return AzureStore(place.location.bucket, config=config, **options)


def azure_account(place: CloudPlace, environ: Mapping[str, str]) -> str:
    """The storage account: that of the URL, or of AZURE_STORAGE_ACCOUNT_NAME.

    Raises:
        DownloadError: there is none, or the credentials are of another one.
    """
    name = "AZURE_STORAGE_ACCOUNT_NAME"
    ours = environ.get(name) or environ.get("AZURE_STORAGE_ACCOUNT") or ""
    url = place.location.url
    if not (place.account or ours):
        raise DownloadError(
            f"{url} names no storage account: set {name} (AZURE_STORAGE_CONNECTION_STRING is not "
            "read), or write abfss://container@account.dfs.core.windows.net/path"
        )
    if place.account and ours and place.account != ours:
        raise DownloadError(
            f"{url} is of the storage account {place.account}, and {name}={ours}: credentials of "
            "one account are not sent to another"
        )
    return place.account or ours


def _gcs_place(place: CloudPlace, environ: Mapping[str, str]) -> str:
    return f"bucket {place.location.bucket} at {environ.get('GOOGLE_BASE_URL') or 'Google Cloud'}"


def _azure_place(place: CloudPlace, environ: Mapping[str, str]) -> str:
    account = azure_account(place, environ)
    endpoint = environ.get("AZURE_STORAGE_ENDPOINT")
    at = f" at {endpoint}" if endpoint else ""
    return f"container {place.location.bucket} of the storage account {account}{at}"


GOOGLE: Final = Provider(
    _open_gcs,
    _gcs_place,
    "set GOOGLE_APPLICATION_CREDENTIALS, give the machine a service account, or set "
    "GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "storage.objects.list and storage.objects.get on the bucket (Storage Object Viewer)",
)
AZURE: Final = Provider(
    _open_azure,
    _azure_place,
    "set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, give the machine an identity, or "
    "set AZURE_SKIP_SIGNATURE=true for a public container",
    "to list and to read blobs of the container (Storage Blob Data Reader)",
)
