"""What the hub is asked before anything is fetched: a revision's files, and small files as text."""

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import UnreachableError
from lmi_vllm.sources.hub.errors import hiding_signed_urls, translating
from lmi_vllm.sources.hub.location import HubRepository
from lmi_vllm.sources.storage import with_retries

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

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
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status  # noqa: PLC0415

    headers = {"authorization": f"Bearer {source.token}"} if source.token else {}

    def ask(attempt: int) -> str | None:
        with translating(source):
            url = hf_hub_url(
                source.repository, name, revision=source.revision, endpoint=source.endpoint
            )
            # Redirects are followed, and the token stays with the hub's own host.
            answer = get_session().get(
                url,
                headers=headers,
                timeout=source.metadata_timeout_seconds,
            )
            reason = answer.headers.get("X-Error-Code", _NO_FILE)
            if answer.status_code == HTTPStatus.NOT_FOUND and reason == _NO_FILE:
                return None
            hf_raise_for_status(answer)
            return str(answer.text)

    with hiding_signed_urls():
        try:
            return with_retries(source.label, ask)
        except UnreachableError as error:
            return _cached_text(source, name, f"{source.endpoint}: {error}")


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
    from huggingface_hub import HfApi  # noqa: PLC0415

    with translating(source):
        return HfApi(endpoint=source.endpoint, token=source.token or False).model_info(
            source.repository,
            revision=source.revision,
            files_metadata=with_files,
            timeout=source.metadata_timeout_seconds,
        )
