"""The weights that `validate` counts are those that Transformers makes of the same config.json."""

import json

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from lmi_vllm.features.validate.weights import count_weights

pytestmark = pytest.mark.vllm
# Each class's defaults are, by its documentation, the config.json of a published model or near it.
FAMILIES = (
    "apertus", "arcee", "bloom", "cohere", "cohere2", "deepseek_v3", "exaone4", "falcon", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granitemoe", "jais2", "llama", "llama4_text", "minimax_m2",
    "mistral", "mixtral", "mpt", "olmo", "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_model_that_transformers_makes(family: str) -> None:
    """To 0.15 %: norms and biases are left out. No number is computed: the device is `meta`."""
    config = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = {id(each): each.numel() for each in model.parameters()}
    counted = count_weights(json.loads(config.to_json_string()))
    assert counted is not None
    assert counted.total == pytest.approx(sum(parameters.values()), rel=0.0015)


@pytest.mark.parametrize(
    "family",
    ["bert", "eurobert", "jina_embeddings_v3", "llama", "modernbert", "nomic_bert", "xlm-roberta"],
)
def test_weights_without_an_output_are_those_of_the_model(family: str) -> None:
    """To 3 %: a pooler and the types of tokens are left out, too."""
    config = CONFIG_MAPPING[family]()
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    stated = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    counted = count_weights(stated)
    assert counted is not None
    assert counted.total == pytest.approx(model.num_parameters(), rel=0.03)
