"""The options of adapters on demand: their store, and the size and freshness of the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.local import file_url_path, is_url
from lmi_vllm.translate.draft import ArgumentDraft

HUB_PREFIX: Final = "hf://"
GIB: Final = 1 << 30


class AdapterStoreSettings(FeatureSettings):
    """Where adapters are found, and how many are kept."""

    section: ClassVar[str] = "LoRA adapters"

    # fmt: off
    adapter_store: str | None = option(parse.plain_text, ours(),
        values="URL of a store, folder, `hf://owner/`",
        note="Store of adapters that are loaded when a request names them.")
    adapter_store_cache_gb: float = option(parse.gigabytes, ours(), default=20.0, values="GiB",
        note="Size of their files on disk. The least recently used adapters are removed.")
    adapter_store_refresh_seconds: float = option(parse.seconds, ours(), default=60.0,
        values="seconds", note="After this time a request compares its adapter with the store. "
        "0: every request does.")
    # fmt: on


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """How often a cached adapter is compared with the store, and the limits of size and waiting."""

    limits: Limits  # of one adapter
    refresh_seconds: float
    drop_seconds: Callable[[], float]  # that requests have to end on a dropped adapter


def check_store(draft: ArgumentDraft) -> None:
    """Refuse a store that lacks `enable_lora`, its switch, or a valid URL."""
    settings = draft.settings.feature(AdapterStoreSettings)
    if not settings.adapter_store:
        return
    label = f"option.adapter_store={settings.adapter_store}"
    if not draft.settings.model.enable_lora:
        draft.fail(f"{label} needs option.enable_lora=true")
    if not settings.adapter_store.startswith(HUB_PREFIX):
        try:
            file_url_path(settings.adapter_store)
        except ValueError as error:
            draft.fail(f"{label}: {error}")
        if is_url(settings.adapter_store) and not draft.sources.is_store(settings.adapter_store):
            draft.fail(f"{label} {draft.sources.unclaimed_reason()}")
        return
    if not draft.settings.server.lmi_adapter_hub:
        draft.fail(f"{label} needs LMI_ADAPTER_HUB=true")
    owner = settings.adapter_store.removeprefix(HUB_PREFIX).strip("/")
    if not owner or "/" in owner:
        draft.fail(f"{label}: expected {HUB_PREFIX}owner/")
