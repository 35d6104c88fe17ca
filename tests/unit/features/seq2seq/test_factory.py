"""The engine over Transformers is chosen by the model, in the core's table of engines."""

import json
from pathlib import Path

from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.server.engines import engine_factory
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import CONFIGURATION, PARTS, load_settings, translate


def test_an_encoder_decoder_model_chooses_the_engine_of_the_extra(tmp_path: Path) -> None:
    """Under `--engine vllm`, the usual one; the translation alone has read its config.json."""
    config = {"architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = ModelArtifacts("m", str(tmp_path), str(tmp_path))
    arguments = translate(load_settings({}), model, Devices(0)).arguments
    (tmp_path / "config.json").unlink()
    factory = engine_factory(
        "vllm", {}, {}, "json", CONFIGURATION.translator.engines, PARTS.engines
    )
    assert factory.kind(arguments) == "transformers"
