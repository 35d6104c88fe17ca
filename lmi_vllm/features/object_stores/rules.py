"""Finds URLs that cannot be read on this machine, before anything is fetched."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from lmi_vllm.config.setting import Setting
from lmi_vllm.translate.draft import ArgumentDraft


def check_urls(draft: ArgumentDraft) -> None:
    """Refuse URLs in a form that is not read, or whose package is missing."""
    found: dict[str, tuple[Setting, ...]] = {}
    for setting in draft.settings.all_details():
        found |= dict.fromkeys(_texts(setting.value), (setting,))
    if draft.model is not None:  # perhaps named by load_models
        found.setdefault(draft.model.reference, ())
    for text, about in found.items():
        store = draft.sources.store_of(text)
        if store is not None and (problem := store.problem(text)):
            # Where vLLM is not installed either, another machine is to serve.
            is_elsewhere = "obstore:" in problem and find_spec("vllm") is None
            named = "".join(f"{setting.label}: " for setting in about)
            (draft.warn if is_elsewhere else draft.fail)(f"{named}{problem}", *about)


def _texts(value: object) -> Iterator[str]:
    """The URLs of a setting's value."""
    texts = value.values() if isinstance(value, Mapping) else (value,)
    yield from (text for text in texts if isinstance(text, str) and "://" in text)
