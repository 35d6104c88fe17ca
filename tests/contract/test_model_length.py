"""The length that vLLM serves, from models that state none or promise too much."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.engine.arg_utils import AsyncEngineArgs

from lmi_vllm.engine.vllm.configuration import engine_config
from tests.contract.vllm_configuration import translated
from tests.support.vllm_namespace import namespace_of

pytestmark = pytest.mark.vllm
PLAIN = "option.skip_tokenizer_init=true\noption.enforce_eager=true\n"
MAMBA = {
    "model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "vocab_size": 512, "state_size": 16, "intermediate_size": 128,
    "conv_kernel": 4, "time_step_rank": 4, "expand": 2,
}  # fmt: skip
BLOOM = {
    "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 64, "n_head": 2,
    "n_layer": 2, "vocab_size": 512,
}  # fmt: skip
DYNAMIC = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 512, "intermediate_size": 64,
    "max_position_embeddings": 256, "rope_scaling": {"type": "dynamic", "factor": 2.0},
}  # fmt: skip


def configured(config: dict[str, Any], folder: Path, lines: str = "") -> Any:
    """The configuration in vLLM of a model, as a start makes it."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    namespace = namespace_of(translated(PLAIN + lines, folder).values)
    return engine_config(namespace, 1, 0, is_cpu=True).model_config


@pytest.mark.parametrize("config", [MAMBA, BLOOM], ids=["mamba", "bloom"])
def test_model_without_a_length_starts_with_vllm_s_own(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """As without the argument; where the KV cache is too small, the engine takes what fits."""
    found = configured(config, tmp_path)
    assert (found.max_model_len, found.original_max_model_len) == (2048, -1)


def test_a_length_that_is_set_counts_where_the_model_states_none(tmp_path: Path) -> None:
    """Nothing else says how long a prompt may be."""
    assert configured(MAMBA, tmp_path, "option.max_model_len=4096\n").max_model_len == 4096


def test_plain_vllm_takes_minus_one_for_a_length(tmp_path: Path) -> None:
    """It refuses what means the model's own length; once it does not, the workaround may go."""
    (tmp_path / "config.json").write_text(json.dumps(MAMBA), encoding="utf-8")
    plain = AsyncEngineArgs(model=str(tmp_path), max_model_len=-1, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="max_model_len"):
        plain.create_engine_config()


def test_plain_vllm_promises_positions_that_it_has_no_values_for(tmp_path: Path) -> None:
    """Twice the rows of its table; once it does not, the workaround may go."""
    (tmp_path / "config.json").write_text(json.dumps(DYNAMIC), encoding="utf-8")
    plain = AsyncEngineArgs(model=str(tmp_path), skip_tokenizer_init=True)
    assert plain.create_model_config().max_model_len == 512


@pytest.mark.parametrize("lines", ["", "option.max_model_len=400\n"])
def test_dynamic_scaling_ends_with_its_table(lines: str, tmp_path: Path) -> None:
    """Whether or not a length is set."""
    assert configured(DYNAMIC, tmp_path, lines).max_model_len == 256
