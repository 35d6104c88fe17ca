"""What `explain` says of a store of adapters."""

from pathlib import Path

import pytest

from lmi_vllm.features.adapter_store.stores import LocalFolders, open_adapter_store
from tests.support.assembled import AdapterSources
from tests.unit.conftest import ExplainRun

REFUSED = {
    "ftp://bucket/prefix/": "is no URL of a store, such as s3://",
    "file://elsewhere/adapters": "names the machine elsewhere",
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


@pytest.mark.parametrize("place", ["s3://bucket/prefix/", "/folder", "folder", "file:/folder"])
def test_usable_store_is_no_error(explained: ExplainRun, place: str) -> None:
    """With LoRA; without it is an error, too."""
    found = explained("", {"OPTION_ADAPTER_STORE": place, "OPTION_ENABLE_LORA": "true"})
    assert not [text for text in found.errors if "adapter_store" in text]
    found = explained("", {"OPTION_ADAPTER_STORE": place})
    assert [text for text in found.errors if "needs option.enable_lora=true" in text]


@pytest.mark.parametrize("prefix", ["", "file:", "file://", "file://localhost"])
def test_file_url_is_the_folder_that_it_names(prefix: str, tmp_path: Path) -> None:
    """Taken as a relative path it would name a folder that does not exist, and find nothing."""
    found = open_adapter_store(f"{prefix}{tmp_path}", AdapterSources({}), {})
    assert isinstance(found, LocalFolders)
    assert found.root == tmp_path
