"""The options of adapters on demand: their store, and the size and freshness of the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from lmi_vllm.config import parsers as parse
from lmi_vllm.config.options.row import option, ours
from lmi_vllm.config.settings import FeatureSettings
from lmi_vllm.sources.base import Limits
from lmi_vllm.sources.local import file_url_path, is_directory, is_url
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


def _check_place(draft: ArgumentDraft, store: str, label: str) -> None:
    """Refuse a URL that no source knows; a folder may be mounted later, so that is a warning."""
    if is_url(store):
        if not draft.sources.is_store(store):
            draft.fail(f"{label} {draft.sources.unclaimed_reason()}")
        return
    try:
        folder = file_url_path(store) or Path(store)
    except ValueError as error:
        draft.fail(f"{label}: {error}")
    else:
        if not is_directory(folder.expanduser()):
            draft.warn(f"{label} is no folder yet: until it is, no adapter is found there")


def check_store(draft: ArgumentDraft) -> None:
    """Refuse a store that lacks `enable_lora`, its switch, or a valid URL."""
    settings = draft.settings.feature(AdapterStoreSettings)
    if not settings.adapter_store:
        return
    label = f"option.adapter_store={settings.adapter_store}"
    if not draft.settings.model.enable_lora:
        draft.fail(f"{label} needs option.enable_lora=true")
    if not settings.adapter_store.startswith(HUB_PREFIX):
        _check_place(draft, settings.adapter_store, label)
        return
    if not draft.settings.server.lmi_adapter_hub:
        draft.fail(f"{label} needs LMI_ADAPTER_HUB=true")
    owner = settings.adapter_store.removeprefix(HUB_PREFIX).strip("/")
    if not owner or "/" in owner:
        draft.fail(f"{label}: expected {HUB_PREFIX}owner/")
