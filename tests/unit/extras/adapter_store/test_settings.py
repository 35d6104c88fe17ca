"""What `explain` says of a store of adapters."""

import pytest

from tests.unit.conftest import ExplainRun

REFUSED = {
    "gs://bucket/prefix/": "is no URL of a store, such as s3://",
    "hf://owner/": "needs LMI_ADAPTER_HUB=true",
    "hf://owner/name": "expected hf://owner/",
}


@pytest.mark.parametrize(("place", "reason"), REFUSED.items(), ids=REFUSED)
def test_place_that_cannot_be_used_is_an_error(
    explained: ExplainRun, place: str, reason: str
) -> None:
    """Found before a model is fetched."""
    found = explained("", {"OPTION_ADAPTER_STORE": place, "OPTION_ENABLE_LORA": "true"})
    assert [text for text in found.errors if f"={place} {reason}" in text or reason in text]


@pytest.mark.parametrize("place", ["s3://bucket/prefix/", "/folder", "folder"])
def test_usable_store_is_no_error(explained: ExplainRun, place: str) -> None:
    """With LoRA; without it is an error, too."""
    found = explained("", {"OPTION_ADAPTER_STORE": place, "OPTION_ENABLE_LORA": "true"})
    assert not [text for text in found.errors if "adapter_store" in text]
    found = explained("", {"OPTION_ADAPTER_STORE": place})
    assert [text for text in found.errors if "needs option.enable_lora=true" in text]


def test_store_needs_the_extra_that_opens_it(
    explained: ExplainRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is named."""
    monkeypatch.setattr("lmi_vllm.sources.table.stores", tuple)
    found = explained("", {"OPTION_ADAPTER_STORE": "s3://b/p", "OPTION_ENABLE_LORA": "true"})
    assert [text for text in found.errors if "needs the extra object_stores" in text]
