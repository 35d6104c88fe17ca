"""The engine over Transformers is chosen by the model, in the core's table of engines."""

import json
from pathlib import Path

from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.engines import engine_factory


def test_an_encoder_decoder_model_chooses_the_engine_of_the_extra(tmp_path: Path) -> None:
    """Under `--engine vllm`, which is the usual one."""
    config = {"architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    factory = engine_factory("vllm", {}, {}, "json")
    assert factory.kind(EngineArguments({"model": str(tmp_path)})) == "transformers"
