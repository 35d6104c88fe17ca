"""The options of sessions, and what may be wrong with them."""

from pathlib import Path
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.translate.draft import ArgumentDraft

DEFAULT_ROOT: Final = Path("/dev/shm/djl_sessions")


class SessionSettings(FeatureSettings):
    """Sticky sessions."""

    section: ClassVar[str] = "Sessions"

    # fmt: off
    enable_stateful_sessions: bool = option(parse.boolean, ours(), default=True,
        note="Sticky sessions.")
    sessions_path: str = option(parse.plain_text, ours(), default="/dev/shm/djl_sessions",
        values="path", note="Directory of the session files.")
    sessions_expiration: float = option(parse.seconds, ours(), default=1200, values="seconds",
        note="Life of a session after its creation.")
    sessions_s3url: str | None = option(parse.plain_text, ours(), values="S3 URL",
        note="Sessions are shared there, and their directories copied at exit.")
    # fmt: on


def check_store(draft: ArgumentDraft) -> None:
    """Warn of a URL that no store claims: sessions would silently stay local."""
    url = (draft.settings.feature(SessionSettings).sessions_s3url or "").strip()
    if url and draft.sources.store_of(url) is None:
        reason = draft.sources.unclaimed_reason()
        draft.warn(f"option.sessions_s3url={mask_urls(url)} {reason}: it has no effect")
