"""What the engine is started with, once the model's files are here."""

from pathlib import Path

import pytest

from lmi_vllm.features.requirements import packages
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.server.model_files import ModelFetch
from lmi_vllm.sources.table import Sources
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import CONFIGURATION, PARTS, load_settings, translate


async def test_final_translation_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fetched files, and with all that was said of the settings before."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setattr(Sources, "fetch_model", lambda *_, **__: tmp_path)
    settings = load_settings({"HF_MODEL_ID": "a/b", "OPTION_SERVED_MODEL_NAME": "served"})
    model = ModelArtifacts("b", "a/b", "a/b", revision="main")
    planned = translate(settings, model, Devices())
    ready = await ModelFetch(model, planned, CONFIGURATION, PARTS.start, {}, lambda _: None).fetch()
    final = ready.translation
    assert (final.model, final.settings) == (ready.model, settings)
    assert (final.arguments.values["model"], ready.model.model) == (str(tmp_path),) * 2
    assert final.profile.served_names == ("served",)
    assert set(planned.warnings) <= set(final.warnings)


@pytest.mark.parametrize("code", ["none", "local"])
async def test_no_code_of_a_model_means_no_packages(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A package is built by its own code: LMI_CUSTOM_CODE=none installs none, and says so."""
    installed: list[Path] = []

    async def install(requirements: Path, _: object, *, constraints: object) -> None:
        installed.append(requirements)

    monkeypatch.setattr(packages, "install_requirements", install)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "requirements.txt").write_text("./local-package")
    settings = load_settings({"HF_MODEL_ID": str(tmp_path), "LMI_CUSTOM_CODE": code})
    model = ModelArtifacts("b", str(tmp_path), str(tmp_path), directory=tmp_path)
    fetch = ModelFetch(
        model, translate(settings, model, Devices()), CONFIGURATION, PARTS.start, {}, lambda _: None
    )
    await fetch.install_first()
    assert bool(installed) is (code == "local")
    assert ("is not installed: LMI_CUSTOM_CODE=none forbids it" in caplog.text) is not installed
