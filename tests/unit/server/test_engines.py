"""The table of engines: which one runs a model, and what each is made with."""

import json
from pathlib import Path

import pytest

from lmi_vllm.engine.vllm.factory import VllmFactory
from lmi_vllm.errors import EngineStartError
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.engines import engine_factory
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import CONFIGURATION, PARTS, load_settings, translate


def model(folder: Path, architecture: str) -> EngineArguments:
    """Return the arguments for a local model that names that architecture."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = ModelArtifacts("m", str(folder), str(folder))
    return translate(load_settings({}), found, Devices(0)).arguments


def test_vllm_runs_models_that_no_extra_runs(tmp_path: Path) -> None:
    """`--engine vllm` is the usual one."""
    factory = engine_factory(
        "vllm", {}, {}, "json", CONFIGURATION.translator.engines, PARTS.engines
    )
    arguments = model(tmp_path, "LlamaForCausalLM")
    assert arguments.architectures == ("LlamaForCausalLM",)
    assert factory.kind(arguments) == "vllm"
    assert factory.kind(EngineArguments({"model": "a-name/on-the-hub"})) == "vllm"
    assert factory.reads_model


LOGGING = {
    "ours": ({}, {"VLLM_CONFIGURE_LOGGING": "0", "LMI_VLLM_LOG_FORMAT": "json"}),
    "the user's": ({"VLLM_LOGGING_CONFIG_PATH": "/l"}, {"VLLM_LOGGING_CONFIG_PATH": "/l"}),
    "vLLM's": (
        {"VLLM_CONFIGURE_LOGGING": "1", "VLLM_NO_USAGE_STATS": "0"},
        {"VLLM_CONFIGURE_LOGGING": "1", "LMI_VLLM_LOG_FORMAT": "json", "VLLM_NO_USAGE_STATS": "0"},
    ),
}


@pytest.mark.parametrize(("given", "found"), LOGGING.values(), ids=LOGGING)
async def test_vllm_finds_its_variables_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: dict[str, str]
) -> None:
    """Stdout stays ours, no statistics are sent, and what the user has set stays."""
    exports = dict(given)

    def missing(_: EngineArguments) -> None:
        assert exports == {
            "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_STREAM": "ext://sys.stderr", **found
        }  # fmt: skip
        raise ImportError("No module named 'vllm'")

    monkeypatch.setattr("lmi_vllm.engine.vllm.factory.import_vllm", missing)
    with pytest.raises(EngineStartError, match=r"^vLLM cannot be imported: .*lmi-vllm\[cuda\]"):
        await VllmFactory(exports, "json", PARTS.engines.vllm).load(EngineArguments({}))
