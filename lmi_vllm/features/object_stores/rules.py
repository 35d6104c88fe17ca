"""Finds URLs that cannot be read on this machine, before anything is fetched."""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from lmi_vllm.translate.draft import ArgumentDraft


def check_urls(draft: ArgumentDraft) -> None:
    """Refuse URLs in a form that is not read, or whose package is missing."""
    for setting in draft.settings.all_details():
        for text in _texts(setting.value):
            store = draft.sources.store_of(text) if "://" in text else None
            if store is not None and (problem := store.problem(text)):
                # Where vLLM is not installed either, another machine is to serve.
                is_elsewhere = "obstore:" in problem and find_spec("vllm") is None
                (draft.warn if is_elsewhere else draft.fail)(f"{setting.name}: {problem}", setting)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for text in value.values() if isinstance(text, str))
