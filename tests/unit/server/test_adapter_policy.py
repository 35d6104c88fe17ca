"""What a start's adapters may be is what the settings say, in whichever form that was written."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.loads import no_code
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.errors import ModelSourceError
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.server.adapter_start import adapter_policy, load_adapters
from lmi_vllm.server.model_files import ReadyFiles
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.devices import Devices
from tests.support.adapter_files import copy_adapter
from tests.support.assembled import CONFIGURATION, load_settings, model_context, translate


def test_what_the_settings_name_may_come_from_the_hub() -> None:
    """TGI's LORA_ADAPTERS and `--lora-modules` name hub ids, and need no other switch."""
    settings = load_settings({"OPTION_LORA_MODULES": "a=acme/french", "OPTION_ENABLE_LORA": "true"})
    policy = adapter_policy(settings, CONFIGURATION.security)
    assert (policy.hub, policy.named) == (False, {"acme/french"})


async def test_settings_are_not_read_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`1` switches hub ids on, a size with a decimal point is one, `option.env` reaches fetches."""
    folder = copy_adapter(tmp_path / "adapter")
    monkeypatch.setattr(Sources, "fetch_model", lambda *_, **__: folder)
    environ = {"LMI_ADAPTER_HUB": "1", "LMI_ADAPTER_MAX_SIZE": "1000000.0"}
    set_for_fetches = {"OPTION_ENV": "HF_ENDPOINT=http://hub.internal", "OPTION_HF_TOKEN": "hf_own"}
    found: list[AdapterSources] = []

    def hooks(_: AdapterRegistry, sources: AdapterSources | None) -> AdapterHooks:
        assert sources is not None
        found.append(sources)
        return AdapterHooks()

    model = ModelArtifacts("m", str(tmp_path), str(tmp_path))
    settings = load_settings({**environ, **set_for_fetches, "OPTION_ENABLE_LORA": "true"})
    ready = ReadyFiles(model, translate(settings, model, Devices(0)))
    context = model_context(settings, environ)
    context.on_adapters.append(hooks)
    await load_adapters(ready, CONFIGURATION, context, MagicMock(), no_code)
    assert found[0].resolve("someone/french") == str(folder)
    assert found[0].limits.total_bytes == 1_000_000
    assert found[0].environ["HF_ENDPOINT"] == "http://hub.internal"
    assert found[0].environ["HF_TOKEN"] == "hf_own"


async def test_error_of_an_adapter_names_it_once(tmp_path: Path) -> None:
    """With the place that names it."""
    model = ModelArtifacts(reference="demo", model=str(tmp_path), name="demo")
    modules = {"OPTION_LORA_MODULES": f"fr={tmp_path / 'typo'}", "OPTION_ENABLE_LORA": "true"}
    settings = load_settings(modules)
    ready = ReadyFiles(model, translate(settings, model, Devices(0)))
    context = model_context(settings, {})
    with pytest.raises(ModelSourceError, match="OPTION_LORA_MODULES") as caught:
        await load_adapters(ready, CONFIGURATION, context, MagicMock(), no_code)
    assert str(caught.value).count("fr:") == 1
