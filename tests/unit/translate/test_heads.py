"""How many devices can share a model's heads: what `max` means, and what is refused."""

import json
from pathlib import Path

import pytest

from lmi_vllm.checks.model import OwnEngines
from lmi_vllm.checks.model_config import ModelFiles
from lmi_vllm.config.properties import parse_properties
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.translate.arguments import Translation, Translator
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import (
    OPTIONS,
    SOURCES,
    load_settings,
    translate,
    translate_checkpoint,
    translate_start,
)

QWEN = {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 28, "num_key_value_heads": 4}


def translated(given: str, gpus: int, config: dict[str, object]) -> Translation:
    """Return the translation for a model with this config.json."""
    environ = {"SERVING_MODEL_STORE": "/nonexistent"}
    settings = load_settings(environ, extra_properties=parse_properties(given))
    return translate(settings, None, Devices(gpus), ModelFiles(config))


MAX = (  # heads, KV heads, GPUs, options, devices of a copy, copies
    (28, 4, 8, "", 4, 2),
    (28, 4, 8, "option.tensor_parallel_degree=max", 4, 2),
    (28, 4, 8, "option.enable_lora=true", 4, 2),
    (28, 4, 4, "", 4, 1),
    (32, 8, 3, "", 2, 1),
    (32, 8, 8, "", 8, 1),
    (64, 8, 16, "", 16, 1),  # more devices than KV heads: two devices have the same one
    (24, 4, 6, "", 4, 1),  # 6 divides 24, but not with 4
    (28, 4, 8, "option.pipeline_parallel_degree=2", 4, 1),
)


@pytest.mark.parametrize(("heads", "kv_heads", "gpus", "given", "size", "copies"), MAX)
def test_max_is_the_largest_size_that_divides_the_heads(
    heads: int, kv_heads: int, gpus: int, given: str, size: int, copies: int
) -> None:
    """With one warning where it is not every GPU; the others run further copies."""
    config = QWEN | {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    found = translated(given, gpus, config)
    assert found.errors == ()
    assert found.arguments.values["tensor_parallel_size"] == size
    assert found.arguments.values.get("data_parallel_size", 1) == copies
    pipeline = int(str(found.arguments.values["pipeline_parallel_size"]))
    said = [text for text in found.warnings if "heads do not divide" in text]
    assert len(said) == (size * pipeline < gpus)


def test_size_that_does_not_divide_the_heads_is_refused() -> None:
    """By its option, with what is possible; before anything is fetched or imported."""
    (error,) = translated("option.tensor_parallel_degree=8", 8, QWEN).errors
    assert "tensor_parallel_size=8 does not divide the model's 28 attention heads" in error
    assert error.index("possible are 1, 2, 4, 28") > 0


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ('option.hf_overrides={"num_attention_heads": 32, "num_key_value_heads": 8}', {}),
        ("", {"num_attention_heads": None}),  # a model without attention
        ("", {"architectures": ["T5ForConditionalGeneration"], "num_attention_heads": None,
              "num_heads": 6}),  # not vLLM's: its engine uses one device
    ],
)  # fmt: skip
def test_models_whose_heads_are_not_these_are_let_alone(
    given: str, changes: dict[str, object]
) -> None:
    """No error, and no warning about heads."""
    found = translated(given, 8, QWEN | changes)
    assert found.errors == ()
    assert not [text for text in found.warnings if "heads" in text]


@pytest.mark.parametrize(("gpus", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_embedded_model_starts_on_any_number_of_devices(gpus: int, size: int) -> None:
    """It has four heads; nothing else is asked for."""
    settings = load_settings({"SERVING_MODEL_STORE": str(Path(DEMO_MODEL_DIR))})
    found = translate_start(settings, {}, Devices(gpus))
    assert found.errors == ()
    assert found.arguments.values["tensor_parallel_size"] == size


def test_fetched_model_of_other_heads_is_refused(tmp_path: Path) -> None:
    """Its config.json was not known when the size was chosen."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    settings, devices = load_settings({"SERVING_MODEL_STORE": "/nonexistent"}), Devices(8)
    before = translate(settings, None, devices)
    assert before.arguments.values["tensor_parallel_size"] == 8
    model = ModelArtifacts("lmi", "acme/assistant", str(tmp_path))
    (error,) = translate_checkpoint(settings, model, devices, before.arguments).errors
    assert "possible are 1, 2, 4, 28" in error


def test_sizes_are_part_of_every_translation() -> None:
    """They do not depend on a verb that shows them, nor on any other feature."""
    config = QWEN | {"num_attention_heads": 6, "num_key_value_heads": 6}
    bare = Translator(OPTIONS, SOURCES, OwnEngines(()), {})
    settings = load_settings({"SERVING_MODEL_STORE": "/nonexistent"})
    found = bare.translate(settings, None, Devices(8), ModelFiles(config))
    assert found.arguments.values["tensor_parallel_size"] == 6
