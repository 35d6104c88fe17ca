"""Adapters fetched from the hub, by the model downloader, on loopback."""

from pathlib import Path

import pytest

from lmi_vllm.adapters.source import AdapterPolicy
from lmi_vllm.errors import AdapterRefusedError
from tests.support.adapter_files import CAPITALS
from tests.support.assembled import AdapterSources
from tests.support.hub_server import Repository, hub_server

FILES = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}


def names_in(folder: str) -> set[str]:
    """Return the names of all files of a folder."""
    return {file.name for file in Path(folder).iterdir()}


def test_hub_repository_is_bounded_before_it_is_fetched(tmp_path: Path) -> None:
    """By its listing, which has the sizes."""
    with hub_server(acme__french=Repository(dict(FILES))) as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_MAX_SIZE"):
            AdapterSources(environ, AdapterPolicy(hub=True, max_bytes=1000)).resolve("acme/french")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_hub_id_is_fetched_where_allowed(tmp_path: Path) -> None:
    """With LMI_ADAPTER_HUB=true a hub id is fetched like a model; a missing one is refused."""
    with hub_server(acme__french=Repository(dict(FILES))) as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        sources = AdapterSources(environ, AdapterPolicy(hub=True))
        assert set(FILES) <= names_in(sources.resolve("acme/french"))
        with pytest.raises(AdapterRefusedError, match="acme/none"):
            sources.resolve("acme/none")
        named = AdapterSources(environ, AdapterPolicy(named=frozenset({"acme/french"})))
        assert set(FILES) <= names_in(named.resolve("acme/french"))
        with pytest.raises(AdapterRefusedError, match="LMI_ADAPTER_HUB=true"):
            named.resolve("acme/none")


def test_only_the_adapter_is_fetched_from_the_hub(tmp_path: Path) -> None:
    """States of the training are not; a repository without an adapter is refused by its listing."""
    states = {"optimizer.pt": bytes(1 << 20), "checkpoint-1/adapter_model.safetensors": b"x"}
    model = {"config.json": b"{}", "model.safetensors": b"x"}
    repositories = {
        "acme__french": Repository({**FILES, **states}),
        "acme__model": Repository(model),
    }
    with hub_server(**repositories) as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        sources = AdapterSources(environ, AdapterPolicy(hub=True, max_bytes=1 << 20))
        assert names_in(sources.resolve("acme/french")) == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        with pytest.raises(AdapterRefusedError, match=r"acme/model has no adapter_config\.json"):
            sources.resolve("acme/model")
    assert not list(tmp_path.rglob("model.safetensors"))
