"""Calls of the hub's API: the files of a revision with their sizes, and small files as text."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from lmi_vllm.errors import DownloadError, MissingRepositoryError
from lmi_vllm.features.hub.errors import hiding_signed_urls, translating
from lmi_vllm.features.hub.location import HubRepository
from lmi_vllm.features.transfer import with_retries
from lmi_vllm.sources.base import InterruptedTransferError, RefusedAccessError, UnreachableError

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

TEXT_BYTES: Final = 8 << 20
LISTING_BYTES: Final = 32 << 20  # 100000 files
_NO_FILE: Final = "EntryNotFound"  # of a repository that is there


def commit_of(source: HubRepository) -> str:
    """The commit that the revision of `source` stands for now.

    Raises:
        DownloadError: the hub refused.
        UnreachableError: the hub does not answer.
    """
    return with_retries(source.label, lambda _: model_info(source, with_files=False)).sha or ""


def read_hub_text(source: HubRepository, name: str) -> str | None:
    """One small file of the repository, of its cached copy where the hub is away; None without one.

    Raises:
        DownloadError: the hub refused, or does not answer and nothing is cached.
    """
    if source.is_offline:
        return _cached_text(source, name, "HF_HUB_OFFLINE is set")
    from huggingface_hub import hf_hub_url, hf_raise_for_status  # noqa: PLC0415

    def ask(attempt: int) -> str | None:
        with translating(source):
            url = hf_hub_url(
                source.repository, name, revision=source.revision, endpoint=source.endpoint
            )
            with _asked(source, url) as answer:
                reason = answer.headers.get("X-Error-Code", _NO_FILE)
                if answer.status_code == HTTPStatus.NOT_FOUND and reason == _NO_FILE:
                    return None
                hf_raise_for_status(answer)
                content = _content(answer, f"{name} of {source.label}", TEXT_BYTES)
                return content.decode("utf-8", "replace")

    def ask_or_cached(attempt: int) -> str | None:
        try:
            return ask(attempt)
        except UnreachableError as error:
            return _cached_text(source, name, f"{source.endpoint}: {error}")
        except (InterruptedTransferError, RefusedAccessError, MissingRepositoryError) as error:
            try:
                return _cached_text(source, name, str(error))
            except DownloadError:
                raise error from None

    with hiding_signed_urls():
        return with_retries(source.label, ask_or_cached)


def has_no_answer(error: DownloadError) -> bool:
    """Whether the hub refuses access, or is overloaded: a copy that is there may be used."""
    return isinstance(error, (RefusedAccessError, MissingRepositoryError)) or isinstance(
        error.__cause__, InterruptedTransferError
    )


def _cached_text(source: HubRepository, name: str, reason: str) -> str | None:
    reference = source.folder / "refs" / (source.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else source.revision or "main"
    snapshot = source.folder / "snapshots" / commit
    if not snapshot.is_dir():
        raise DownloadError(f"{source.label} cannot be read ({reason}) and is not in the cache")
    file = snapshot / name
    return file.read_text("utf-8") if file.is_file() else None


def model_info(source: HubRepository, *, with_files: bool) -> "ModelInfo":
    """The hub's answer on the revision of `source`, with the sizes of its files where asked."""
    from huggingface_hub import ModelInfo, hf_raise_for_status  # noqa: PLC0415
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
        validate_repo_id,
    )

    with translating(source):
        validate_repo_id(source.repository)
        url = f"{source.endpoint}/api/models/{source.repository}"
        if source.revision is not None:
            url += f"/revision/{quote(source.revision, safe='')}"
        query = "?blobs=true" if with_files else ""
        with _asked(source, url + query) as answer:
            hf_raise_for_status(answer)
            listing = _content(answer, f"the list of files of {source.label}", LISTING_BYTES)
    try:
        return ModelInfo(**json.loads(listing))  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise UnreachableError(
            "its answer is no list of files: a proxy or a login page is in between"
        ) from error


@contextmanager
def _asked(source: HubRepository, url: str) -> Iterator[Any]:
    """The hub's answer, of which nothing has been read where it is a success."""
    from huggingface_hub import get_session  # noqa: PLC0415

    # Redirects are followed, and the token stays with the hub's own host.
    headers = {"authorization": f"Bearer {source.token}"} if source.token else {}
    seconds = source.metadata_timeout_seconds
    with get_session().stream("GET", url, headers=headers, timeout=seconds) as answer:
        if answer.is_error:
            answer.read()  # what refusals are made of
        yield answer


def _content(answer: Any, shown: str, most: int) -> bytes:
    """The body of an answer.

    Raises:
        DownloadError: it is more than `most` bytes, which are not all read.
    """
    body = bytearray()
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > most:
            raise DownloadError(f"{shown} is not read: it has more than {most} bytes")
    return bytes(body)
