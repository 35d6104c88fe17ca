"""Finds URLs that cannot be read on this machine, before anything is fetched."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from lmi_vllm.config.setting import Setting
from lmi_vllm.translate.draft import ArgumentDraft


def check_urls(draft: ArgumentDraft) -> None:
    """Refuse URLs in a form that is not read, or whose package or account is missing."""
    found: dict[str, tuple[Setting, ...]] = {}
    for setting in draft.settings.all_details():
        found |= dict.fromkeys(_texts(setting.value), (setting,))
    if draft.model is not None:  # perhaps named by load_models
        found.setdefault(draft.model.reference, ())
    for text, about in found.items():
        store = draft.sources.store_of(text)
        if store is None:
            continue
        problem = store.problem(text)
        lacking = "" if problem or draft.environ is None else store.lacking(text, draft.environ)
        if problem or lacking:
            # Where vLLM is not installed either, another machine is to serve.
            is_of_machine = bool(lacking) or "obstore:" in problem
            is_elsewhere = is_of_machine and find_spec("vllm") is None
            named = "".join(f"{setting.label}: " for setting in about)
            (draft.warn if is_elsewhere else draft.fail)(f"{named}{problem or lacking}", *about)


def _texts(value: object) -> Iterator[str]:
    """The URLs of a setting's value."""
    texts = value.values() if isinstance(value, Mapping) else (value,)
    yield from (text for text in texts if isinstance(text, str) and "://" in text)
