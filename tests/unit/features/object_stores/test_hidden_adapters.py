"""The adapters that a start finds in the prefix of the model."""

import logging
from pathlib import Path

import pytest

from lmi_vllm.adapters.loads import no_code
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.server.adapter_start import load_adapters
from lmi_vllm.server.model_files import ReadyFiles
from lmi_vllm.translate.devices import Devices
from tests.support.adapter_files import copy_adapter
from tests.support.assembled import CONFIGURATION, load_settings, model_context, translate


async def test_adapter_of_a_prefix_that_is_hidden_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model directory's counts; that the prefix has one of that name is said."""
    for place in ("own", "fetched"):
        copy_adapter(tmp_path / place / "adapters" / "fr")
    copy_adapter(tmp_path / "fetched" / "adapters" / "de")
    model = ModelArtifacts(
        "m", "s3://u:p4ss@bucket/m", str(tmp_path / "fetched"), directory=tmp_path / "own"
    )
    with caplog.at_level(logging.WARNING):
        settings = load_settings({"OPTION_ENABLE_LORA": "true"})
        registry = await load_adapters(
            ReadyFiles(model, translate(settings, model, Devices(0))),
            CONFIGURATION,
            model_context(settings),
            ScriptedEngine(),
            no_code,
        )
    assert sorted(adapter.name for adapter in registry) == ["de", "fr"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"adapter fr: {tmp_path / 'own'}")
    assert "p4ss" not in line
