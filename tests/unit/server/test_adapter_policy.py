"""What a start's adapters may be is what the settings say, in whichever form that was written."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from lmi_vllm.adapters import source
from lmi_vllm.adapters.loads import no_code
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.config.load import load_settings
from lmi_vllm.messages import EngineArguments, ModelArtifacts, ServingProfile
from lmi_vllm.server.adapter_start import load_adapters
from tests.support.adapter_files import copy_adapter


async def test_settings_are_not_read_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`1` switches hub ids on, and a size with a decimal point is one."""
    folder = copy_adapter(tmp_path / "adapter")
    monkeypatch.setattr(source, "fetch_model", lambda *_, **__: folder)
    environ = {"LMI_ADAPTER_HUB": "1", "LMI_ADAPTER_MAX_SIZE": "1000000.0"}
    found: list[AdapterSources] = []

    async def announce(_: AdapterRegistry, sources: AdapterSources) -> None:
        found.append(sources)

    await load_adapters(
        ModelArtifacts("m", str(tmp_path), str(tmp_path)),
        EngineArguments({}),
        ServingProfile(enable_lora=True),
        load_settings(environ),
        environ,
        MagicMock(),
        load_code=no_code,
        announce=[announce],
    )
    assert found[0].resolve("someone/french") == str(folder)
    assert found[0].limits.total_bytes == 1_000_000
