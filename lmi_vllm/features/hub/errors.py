"""Translates huggingface_hub's exceptions, and removes signed URLs from its log lines."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Final

from lmi_vllm.errors import DownloadError, MissingRepositoryError
from lmi_vllm.features.hub.location import HubRepository
from lmi_vllm.features.transfer import without_secrets
from lmi_vllm.sources.base import (
    InterruptedTransferError,
    NothingThereError,
    RefusedAccessError,
    UnreachableError,
)

_CHATTY_LOGGERS: Final = (
    "huggingface_hub.file_download",
    "huggingface_hub.utils._http",
    "httpx",
    "httpx2",
)
_UNAUTHORIZED: Final = 401
_FORBIDDEN: Final = (_UNAUTHORIZED, 403)
_MISSING: Final = (404, 410)
_HUB_HEADERS: Final = ("X-Error-Code", "X-Error-Message")
_WRONG_SIZE: Final = "Consistency check failed"  # the library's text
_FIRST_SERVER_FAULT: Final = 500
_RETRIED_STATUSES: Final = (408, 429)


class UnknownReferenceError(MissingRepositoryError, NothingThereError):
    """The text is no name that the hub could have."""


@contextmanager
def translating(source: HubRepository) -> Iterator[None]:
    """Raise only `DownloadError`, `UnreachableError` or `InterruptedTransferError` in the block.

    An error of the local disk leaves as the `OSError` it is.
    """
    # HTTPError is the base class of the library's own HTTP client (httpx or httpx2).
    from huggingface_hub.errors import (  # type: ignore[attr-defined]  # noqa: PLC0415
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except HFValidationError as error:
        raise UnknownReferenceError(_unknown(source.repository)) from error
    except HfHubHTTPError as error:
        raise _of_answer(source, error) from error
    except OfflineModeIsEnabled as error:
        raise UnreachableError("HF_HUB_OFFLINE is set") from error
    except HTTPError as error:
        raise UnreachableError(_reason(error)) from error
    except OSError as error:
        raise _of_system(error) from error
    except RuntimeError as error:  # what hf_xet raises
        raise InterruptedTransferError(_reason(error)) from error


def _of_answer(source: HubRepository, error: Exception) -> Exception:
    """Our error for an answer of the hub that is not a success."""
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        RevisionNotFoundError,
    )

    response = getattr(error, "response", None)
    status = int(getattr(response, "status_code", 0))
    if isinstance(error, GatedRepoError):
        return RefusedAccessError(_gated_text(source))
    if isinstance(error, RevisionNotFoundError):
        return DownloadError(
            f"{source.label}: the repository exists but has no such branch, tag or commit: "
            "check option.revision"
        )
    if _is_missing(source, error, status):
        return MissingRepositoryError(_missing_text(source))
    if status in _FORBIDDEN:
        return RefusedAccessError(
            f"{source.label}: {source.endpoint} refused access with status {status}: check that "
            "HF_TOKEN is valid and may read this repository"
        )
    if status >= _FIRST_SERVER_FAULT or status in _RETRIED_STATUSES:
        return InterruptedTransferError(
            f"{source.endpoint} answered with status {status}", _retry_after(response)
        )
    return DownloadError(f"{source.label}: {source.endpoint} answered with status {status}")


def _retry_after(response: Any) -> float:
    """Return how long an answer asks to wait: seconds, or until a date (RFC 9110, 10.2.3)."""
    text = response.headers.get("Retry-After", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return 0.0


def _is_missing(source: HubRepository, error: Exception, status: int) -> bool:
    """Whether the hub says that there is no such repository, or hides a private one.

    Without a token it answers 401 then, with a header of its own. The library takes any 401 for
    that: one of a mirror or a proxy, and the one for a token that has expired.
    """
    from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

    if status == _UNAUTHORIZED:
        headers = getattr(error, "response").headers  # noqa: B009
        return source.token is None and any(name in headers for name in _HUB_HEADERS)
    return status in _MISSING and not isinstance(error, EntryNotFoundError)


def _gated_text(source: HubRepository) -> str:
    if source.token is None:
        return (
            f"{source.label} is gated and no token is set: accept its terms at "
            f"{source.endpoint}/{source.repository} and set HF_TOKEN"
        )
    return (
        f"{source.label} is gated and the token that is set has no access: accept its terms at "
        f"{source.endpoint}/{source.repository} with the account of that token"
    )


def _missing_text(source: HubRepository) -> str:
    private = (
        "if it is private, set HF_TOKEN"
        if source.token is None
        else "if it is private, the token that is set may not read it"
    )
    return f"{source.label} was not found at {source.endpoint}: check the name; {private}"


def _of_system(error: OSError) -> Exception:
    # A file of the wrong size is a plain OSError, as a full disk is, but has no errno.
    if isinstance(error, ConnectionError) or (error.errno is None and _WRONG_SIZE in str(error)):
        return InterruptedTransferError(_reason(error))
    return error


def _unknown(reference: str) -> str:
    """The message about a text that no source has: the kinds of references there are."""
    return (
        f"{reference!r} is neither an existing path, a URL of a store (s3://bucket/prefix/) nor a "
        "hub id (owner/name)"
    )


def _reason(error: BaseException) -> str:
    return without_secrets(str(error)) or type(error).__name__


@contextmanager
def hiding_signed_urls() -> Iterator[None]:
    """Keep signatures of download URLs out of the log while the block runs."""
    hide = _SignatureFilter()
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).addFilter(hide)
    try:
        yield
    finally:
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).removeFilter(hide)


class _SignatureFilter(logging.Filter):
    """Drops the request lines of the HTTP client and cuts the query off any other URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return False
        record.msg, record.args = without_secrets(record.getMessage()), ()
        return True
