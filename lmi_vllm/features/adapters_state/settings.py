"""The options of where registered adapters are kept."""

from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.sources.local import file_url_path, is_url
from lmi_vllm.translate.draft import ArgumentDraft

LONGEST_REFRESH_SECONDS: Final = 20.0  # replicas report as often, and count for a minute


class AdaptersStateSettings(FeatureSettings):
    """Where adapters are kept, and how often those that replicas share are read."""

    section: ClassVar[str] = "LoRA adapters"

    # fmt: off
    adapters_state: str | None = option(parse.plain_text, ours(), values="path, URL of an object",
        note="File that keeps registered adapters, or S3 object that replicas share.")
    adapters_state_refresh_seconds: float = option(parse.seconds, ours(), default=5.0,
        values="seconds", note="How often `option.adapters_state` is read where it is in S3.")
    # fmt: on


def check_state(draft: ArgumentDraft) -> None:
    """Refuse a URL that names no object, or a store that is not known here."""
    settings = draft.settings.feature(AdaptersStateSettings)
    state = settings.adapters_state or ""
    if state and not draft.settings.model.enable_lora:
        draft.warn(f"option.adapters_state={state} has no effect: option.enable_lora is not true")
    if not is_url(state):
        try:
            file_url_path(state)
        except ValueError as error:
            draft.fail(f"option.adapters_state={state}: {error}")
        return
    if (seconds := settings.adapters_state_refresh_seconds) > LONGEST_REFRESH_SECONDS:
        draft.warn(
            f"option.adapters_state_refresh_seconds={seconds:g}: with more than "
            f"{LONGEST_REFRESH_SECONDS:g} s a call with wait=true may not see every replica"
        )
    scheme, _, path = state.partition("://")
    key = path.partition("/")[2]
    if not draft.sources.is_store(state):
        draft.fail(f"option.adapters_state={state} {draft.sources.unclaimed_reason()}")
    elif not key or key.endswith("/"):
        draft.fail(f"option.adapters_state={state}: expected {scheme}://bucket/key of one object")
