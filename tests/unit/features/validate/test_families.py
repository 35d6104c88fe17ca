"""Architectures of LMI's guides, as published: parameters and the bytes of a token in the cache."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.checks.model_config import read_directory
from lmi_vllm.features.validate.memory_estimate import estimate_memory
from lmi_vllm.features.validate.model_shape import read_shape

Config = Mapping[str, object]
DBRX = {
    "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
    "max_seq_len": 32768, "tie_word_embeddings": False, "attn_config": {"kv_n_heads": 8},
    "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
}  # fmt: skip
SCOUT = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16,
        "interleave_moe_layer_step": 1, "vocab_size": 202048, "tie_word_embeddings": False,
    },
    "vision_config": {"hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34},
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024,
    "num_attention_heads": 71, "multi_query": True, "new_decoder_architecture": False,
}  # fmt: skip
GEMMA_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_hidden_layers": 27, "num_attention_heads": 16,
}  # fmt: skip
QWEN_VISION = {"depth": 32, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
QWEN_TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
BERT_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 24,
}  # fmt: skip
# config.json as published, parameters of the maker's model card or index, KV heads x head size.
PUBLISHED: list[tuple[str, Config, int, int]] = [
    ("falcon-7b", FALCON_7B, 6_921_720_704, 32 * 64),
    ("falcon-7b, first form", FALCON_7B | {"model_type": "RefinedWebModel", "n_head": 71,
        "n_layer": 32, "num_attention_heads": None, "num_hidden_layers": None},
     6_921_720_704, 32 * 64),
    ("falcon-40b", {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True,
        "multi_query": True, "vocab_size": 65024}, 41_303_293_952, 60 * 8 * 64),
    ("starcoder", {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48,
        "n_inner": 24576, "vocab_size": 49152, "n_positions": 8192, "multi_query": True},
     15_517_456_384, 40 * 128),
    ("chatglm3-6b", {"model_type": "chatglm", "hidden_size": 4096, "num_layers": 28,
        "num_attention_heads": 32, "ffn_hidden_size": 13696, "kv_channels": 128,
        "multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024,
        "seq_length": 8192, "tie_word_embeddings": False}, 6_243_584_000, 28 * 2 * 128),
    ("mpt-7b", {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32,
        "expansion_ratio": 4, "vocab_size": 50432, "max_seq_len": 2048,
        "attn_config": {"attn_type": "multihead_attention"}}, 6_649_286_656, 32 * 4096),
    ("dbrx", DBRX, 131_596_523_520, 40 * 8 * 128),
    ("llama-4-scout", SCOUT, 108_641_793_536, 48 * 8 * 128),
    ("qwen-7b", {"model_type": "qwen", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 22016, "kv_channels": 128,
        "vocab_size": 151936, "seq_length": 8192, "tie_word_embeddings": False},
     7_721_324_544, 32 * 4096),
    # The rest is the default of the class, which Transformers does not save.
    ("gemma-3-4b", {"model_type": "gemma3", "vision_config": GEMMA_VISION, "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024}}, 4_300_079_472,
     35 * 4 * 256),  # of 29 and 5 layers vLLM makes groups of 5
    ("gemma-3-12b", {"model_type": "gemma3", "vision_config": GEMMA_VISION, "text_config": {
        "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
        "sliding_window": 1024}}, 12_187_325_040, 48 * 8 * 256),
    ("llava-1.5-7b", {"model_type": "llava", "projector_hidden_act": "gelu",
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}},
     7_063_427_072, 32 * 4096),
    ("qwen2-vl-7b", QWEN_TEXT | {"model_type": "qwen2_vl", "vision_config": QWEN_VISION | {
        "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4}}, 8_291_375_616, 28 * 4 * 128),
    ("qwen2.5-vl-7b", QWEN_TEXT | {"model_type": "qwen2_5_vl", "vision_config": QWEN_VISION | {
        "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}},
     8_292_166_656, 28 * 4 * 128),
    ("bloom", {"model_type": "bloom", "n_embed": 14336, "n_layer": 70,
        "num_attention_heads": 112, "vocab_size": 250880}, 176_247_271_424, 70 * 14336),
    ("gpt2", {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50257}, 124_439_808, 12 * 768),
    ("gpt-j-6b", {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
        "n_inner": None, "n_positions": 2048, "vocab_size": 50400,
        "tie_word_embeddings": False}, 6_050_882_784, 28 * 4096),
    ("gpt-neox-20b", {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44,
        "num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432,
        "tie_word_embeddings": False}, 20_554_567_680, 44 * 6144),
    ("opt-6.7b", {"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "ffn_dim": 16384, "max_position_embeddings": 2048,
        "vocab_size": 50272}, 6_658_473_984, 32 * 4096),
    ("bge-large-en", BERT_LARGE | {"architectures": ["BertModel"], "model_type": "bert",
        "vocab_size": 30522, "max_position_embeddings": 512}, 334_092_288, 0),
    ("bge-reranker-large", BERT_LARGE | {"architectures": ["XLMRobertaForSequenceClassification"],
        "model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514},
     558_842_880, 0),
    ("Skywork-Reward-8B", {"architectures": ["LlamaForSequenceClassification"],
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "vocab_size": 128256}, 7_504_924_672, 32 * 8 * 128),
    ("SmolLM3-3B", {"model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "vocab_size": 128256}, 3_075_098_624, 36 * 4 * 128),
    ("GLM-4.5-Air", {"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_attention_heads": 96, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "n_routed_experts": 128,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "tie_word_embeddings": False},
     106_852_251_264, 46 * 8 * 128),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "values"),
    [row[1:] for row in PUBLISHED],
    ids=[row[0] for row in PUBLISHED],
)
def test_estimate_is_that_of_published_figures(
    config: Config, parameters: int, values: int
) -> None:
    """Parameters to 0.3 %; the cache of a token exactly, keys and values of two bytes."""
    shape = read_shape(config | {"torch_dtype": "bfloat16"})
    found = estimate_memory(shape, {}, None, None)
    assert found is not None
    assert found.weight_bytes == pytest.approx(2 * parameters, rel=0.003)
    assert found.kv_bytes_per_token == 2 * 2 * values


def test_good_deployment_of_a_multi_query_model_fits() -> None:
    """Falcon 7B on 24 GB: its cache was taken for 71 times as large."""
    shape = read_shape(FALCON_7B | {"torch_dtype": "bfloat16"})
    found = estimate_memory(shape, {}, None, int(23.6 * (1 << 30)))
    assert found is not None
    assert (found.longest_fit or 0) > 400_000


def test_folder_with_both_of_mistral_s_layouts_is_counted_once(tmp_path: Path) -> None:
    """Only one of them is loaded."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(1000))
    assert read_directory(tmp_path).weight_bytes == 1000
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(500))
    assert read_directory(tmp_path).weight_bytes == 1000


def test_file_beside_the_shards_of_an_index_is_not_counted(tmp_path: Path) -> None:
    """The engine reads what the index names."""
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_text('{"weight_map": {"a": "model-1.safetensors"}}', "utf-8")
    (tmp_path / "model.safetensors").write_bytes(bytes(500))
    (tmp_path / "model-1.safetensors").write_bytes(bytes(400))
    assert read_directory(tmp_path).weight_bytes == 400


def test_length_that_is_not_stated_is_that_of_the_class() -> None:
    """Falcon 7B was promised 893,891 tokens; vLLM serves 2048."""
    assert read_shape(FALCON_7B).longest == 2048
    assert read_shape(FALCON_7B | {"seq_length": 4096}).longest == 4096


@pytest.mark.parametrize("stated", [{"n_head": 16}, {"num_heads": 16}], ids=str)
def test_number_under_another_name_is_not_a_default(stated: Config) -> None:
    """The class's number would win over the stated one."""
    shape = read_shape({"model_type": "llama", "hidden_size": 1024} | stated)
    assert (shape.heads, shape.head_size) == (16, 64)


@pytest.mark.parametrize(
    ("kind", "longest"),
    [("linear", 8192), ("dynamic", 8192), ("yarn", 4096), ("longrope", 4096), ("llama3", 4096)],
)
def test_longest_sequence_is_by_vllm_s_rule(kind: str, longest: int) -> None:
    """Some kinds state the scaled length already."""
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 1024}
    config = {"max_position_embeddings": 4096, "rope_scaling": rope}
    assert read_shape(config).longest == longest
