"""Tiny random checkpoints, one per architecture, each with a Transformers model to compare with.

Where Transformers has the class, it writes the checkpoint. Where it has not, the weights of an
equal shape that it has (Llama, GLM) are written under the family's own names.
"""

import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from integration.matrix import mistral
from integration.matrix.quantized import REFERENCES, WRITTEN
from integration.matrix.renamed import (
    RENAMED,
    same_heads,
    unit_head,
    with_alibi,
    with_alibi_and_unit_head,
)
from integration.matrix.vision import (
    FIRST_IMAGE_TOKEN,
    OWN_CLASSES,
    published_names,
    tower,
    write_processor,
)
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.text_models import spread

VOCABULARY: Final = 1280  # the embedded model's tokenizer serves them all
HIDDEN: Final = 128
HEADS: Final = 4  # of 32: vLLM's CPU kernel knows no 16
POSITIONS: Final = 1024
SPREAD: Final = 0.15
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_PLAIN = _TOKENS | {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS, "initializer_range": SPREAD,
}  # fmt: skip
_DENSE = _PLAIN | {"intermediate_size": 256, "num_key_value_heads": 2}
_GPT = _TOKENS | {
    "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "n_positions": POSITIONS,
    "initializer_range": SPREAD,
}  # fmt: skip
_LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip

_T5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 32, "d_ff": 256, "num_layers": 2,
    "num_heads": HEADS, "pad_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip

_SIGHTED_TEXT = _DENSE | {"model_type": "llama", "head_dim": 32, "vocab_size": VOCABULARY + 8}
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 128,
}  # fmt: skip
_DEEPSEEK_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
_MLLAMA = {
    "vision_config": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "intermediate_size": 128, "image_size": 32, "patch_size": 16,
        "vision_output_dim": 128, "intermediate_layers_indices": [1]},
    "text_config": _DENSE | {"num_hidden_layers": 4, "cross_attention_layers": [1]},
    "image_token_index": VOCABULARY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the page: how its checkpoint is made and what the server is told."""

    name: str
    title: str  # the guides' word
    kind: str  # of Transformers: the prefix of its Config and ForCausalLM classes
    config: Mapping[str, object]
    model_class: str = ""
    config_class: str = ""
    renamed: Callable[[dict[str, torch.Tensor], dict[str, Any]], None] | None = None
    prepared: Callable[[Any], None] | None = None  # changes the reference before it is written
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    remark: str = ""
    group: str = "models"  # the page's table: models or quantization
    seed: int = 0
    has_own_prompt: bool = False  # vLLM writes the prompt of a chat without the template
    attention: str = "eager"  # of the reference
    processor: str = ""  # of integration/matrix/vision.py: the model reads images
    tokenizer: str = ""  # of integration/matrix/mistral.py

    @property
    def reference(self) -> str:
        """The Transformers class whose tokens count."""
        return self.model_class or f"{self.kind}ForCausalLM"


@dataclass(frozen=True, slots=True)
class Reference:
    """What Transformers answers with; a processor where the model sees."""

    model: Any
    tokenizer: Any
    processor: Any = None


def _row(
    name: str, title: str, kind: str, config: Mapping[str, object], **more: Any
) -> Architecture:
    return Architecture(name, title, kind, config, **more)


def _quantized(scheme: str, title: str, dtype: str = "fp32", seed: int = 0) -> Architecture:
    return _row(
        f"quantized_{scheme}", title, "Llama", _DENSE, renamed=WRITTEN[scheme],
        prepared=REFERENCES[scheme], group="quantization", options={"OPTION_DTYPE": dtype},
        seed=seed,
    )  # fmt: skip


def _mistral(tokenizer: str, title: str, vocabulary: int, *, is_own: bool) -> Architecture:
    """Mistral with its own tokenizer, in Transformers' layout or its own."""
    layout = "own layout" if is_own else "Transformers' layout"
    return _row(
        f"mistral_{tokenizer}{'_own' if is_own else ''}", f"Mistral, {title}, {layout}", "Mistral",
        _DENSE | {"head_dim": 32, "sliding_window": None, "vocab_size": vocabulary,
                  "bos_token_id": 1, "eos_token_id": 2},
        renamed=mistral.own_layout if is_own else None, tokenizer=tokenizer,
    )  # fmt: skip


TRUSTED: Final = MappingProxyType({"OPTION_TRUST_REMOTE_CODE": "true"})
IN_ORDER: Final = MappingProxyType({"OPTION_HF_OVERRIDES": '{"is_mm_prefix_lm":false}'})
_HEAD_32 = {"head_dim": 32}
# Embeddings that are tied and loud make a model repeat its last token; _shake leaves them alone.
_QUIET = {"initializer_range": 0.02}
_SIX_HEADS = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6}
ARCHITECTURES: Final = (
    _row("llama2", "Llama 2", "Llama", _DENSE | {"num_key_value_heads": HEADS}),
    _row("llama3", "Llama 3", "Llama", _DENSE),
    _row("llama3_1", "Llama 3.1", "Llama", _DENSE | {"rope_parameters": _LLAMA_3}),
    _row("yi", "Yi", "Llama", _DENSE | {"rms_norm_eps": 1e-5}, remark="published as Llama"),
    _row("mistral", "Mistral", "Mistral", _DENSE | _HEAD_32 | {"sliding_window": None}),
    _row("mistral_window", "Mistral, sliding window", "Mistral",
         _DENSE | _HEAD_32 | {"sliding_window": 8}),
    _mistral("v3", "SentencePiece v3", mistral.SENTENCEPIECE_VOCABULARY, is_own=False),
    _mistral("v3", "SentencePiece v3", mistral.SENTENCEPIECE_VOCABULARY, is_own=True),
    _mistral("tekken", "Tekken", mistral.TEKKEN_VOCABULARY, is_own=False),
    _mistral("tekken", "Tekken", mistral.TEKKEN_VOCABULARY, is_own=True),
    _row("mixtral", "Mixtral", "Mixtral",
         _DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    _row("qwen2", "Qwen2, Qwen 1.5", "Qwen2", _DENSE),
    _row("qwen3", "Qwen3", "Qwen3", _DENSE | _HEAD_32),
    _row("qwen3_moe", "Qwen3-MoE", "Qwen3Moe", _DENSE | _HEAD_32 | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True}),
    _row("phi3", "Phi-3", "Phi3", _DENSE),
    _row("gemma", "Gemma", "Gemma", _DENSE | _HEAD_32 | _QUIET),
    _row("gemma2", "Gemma 2", "Gemma2", _DENSE | _HEAD_32 | _QUIET | {"query_pre_attn_scalar": 32}),
    _row("gemma3", "Gemma 3 (text)", "Gemma3",
         _DENSE | _HEAD_32 | _QUIET | {"query_pre_attn_scalar": 32},
         config_class="Gemma3TextConfig"),
    _row("gemma3_sees", "Gemma 3", "Gemma3", {
        "vision_config": tower(model_type="siglip_vision_model"),
        "text_config": _DENSE | _HEAD_32 | _QUIET | {
            "query_pre_attn_scalar": 32, "vocab_size": VOCABULARY + 8},
        "mm_tokens_per_image": 4, "boi_token_index": FIRST_IMAGE_TOKEN,
        "image_token_index": FIRST_IMAGE_TOKEN + 1, "eoi_token_index": FIRST_IMAGE_TOKEN + 2},
         model_class="Gemma3ForConditionalGeneration", processor="gemma3", options=IN_ORDER,
         remark="a picture's tokens are read in one direction, in Transformers in both: too little "
                "to change a token; without the option pictures are refused"),
    _row("gpt2", "GPT-2", "GPT2", _GPT, model_class="GPT2LMHeadModel"),
    _row("gpt_neox", "GPT-NeoX", "GPTNeoX", _PLAIN | {"intermediate_size": 256}),
    _row("falcon", "Falcon", "Falcon", _PLAIN | {
        "num_kv_heads": 2, "new_decoder_architecture": True}),
    _row("falcon_7b", "Falcon (7B)", "Falcon", _PLAIN | {
        "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False},
         remark="one key-value head, attention beside the dense layers"),
    _row("falcon_rw", "Falcon (RW)", "Falcon", _PLAIN | {
        "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False,
        "new_decoder_architecture": False}, attention="sdpa",  # Falcon's eager one adds ALiBi twice
         remark="ALiBi in the place of rotary positions"),
    _row("bloom", "BLOOM", "Bloom", _TOKENS | {
        "hidden_size": HIDDEN, "n_layer": 2, "n_head": HEADS} | _QUIET),
    _row("opt", "OPT", "OPT", _PLAIN | {
        "ffn_dim": 256, "word_embed_proj_dim": HIDDEN, "init_std": SPREAD}),
    _row("starcoder2", "StarCoder2", "Starcoder2", _DENSE),
    _row("gpt_bigcode", "StarCoder, Octocoder (GPT-BigCode)", "GPTBigCode",
         _GPT | {"multi_query": True}),
    _row("gptj", "GPT-J", "GPTJ", _GPT | {"rotary_dim": 16, "tie_word_embeddings": False}),
    _row("phi", "Phi, Phi-2", "Phi", _DENSE | {
        "num_key_value_heads": HEADS, "partial_rotary_factor": 0.5}),
    _row("internlm", "InternLM", "Llama", _DENSE | {
        "num_key_value_heads": HEADS, "attention_bias": True},
         renamed=RENAMED["internlm"], options=TRUSTED),
    _row("internlm2", "InternLM2", "Llama", _DENSE, renamed=RENAMED["internlm2"], options=TRUSTED),
    _row("aquila", "Aquila", "Llama", _DENSE | {"num_key_value_heads": HEADS},
         renamed=RENAMED["aquila"], options=TRUSTED),
    _row("aquila2", "Aquila2", "Llama", _DENSE, renamed=RENAMED["aquila2"], options=TRUSTED,
         remark="the second generation has grouped keys and values"),
    _row("baichuan", "Baichuan (7B)", "Llama", _DENSE | {"num_key_value_heads": HEADS},
         renamed=RENAMED["baichuan"], options=TRUSTED),
    _row("baichuan2", "Baichuan2 (7B)", "Llama", _DENSE | {"num_key_value_heads": HEADS},
         renamed=RENAMED["baichuan2"], prepared=unit_head, options=TRUSTED, seed=1),
    _row("baichuan_13b", "Baichuan (13B)", "Llama", _DENSE | _SIX_HEADS,
         renamed=RENAMED["baichuan_13b"], prepared=with_alibi, options=TRUSTED,
         remark="ALiBi was put into the Llama compared with; heads are no power of two, as there"),
    _row("baichuan2_13b", "Baichuan2 (13B)", "Llama", _DENSE | _SIX_HEADS,
         renamed=RENAMED["baichuan2_13b"], prepared=with_alibi_and_unit_head, options=TRUSTED,
         remark="the same"),
    _row("qwen", "Qwen (first generation)", "Qwen2", _DENSE | {
        "num_key_value_heads": HEADS, "rms_norm_eps": 1e-6},
         renamed=RENAMED["qwen"], options=TRUSTED,
         remark="up to `seq_length` tokens: dynamic NTK and logn scaling act beyond it"),
    _row("chatglm", "ChatGLM2, ChatGLM3", "Glm", _DENSE | _HEAD_32 | {
        "attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
         renamed=RENAMED["chatglm"]),
    _row("chatglm_6b", "ChatGLM (first generation)", "Llama", _DENSE,
         renamed=RENAMED["chatglm_6b"], options=TRUSTED,
         remark="positions in two dimensions, a prompt read both ways: vLLM has neither"),
    _row("decilm", "DeciLM (7B)", "Llama",
         _DENSE | {"num_key_value_heads": HEADS}, renamed=RENAMED["decilm"],
         prepared=same_heads, options=TRUSTED,
         remark="key-value heads differ by layer"),
    _row("mpt", "MPT", "Mpt", _TOKENS | {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": 2, "expansion_ratio": 4,
        "max_seq_len": POSITIONS, "initializer_range": SPREAD}),
    _row("dbrx", "DBRX", "Dbrx", _TOKENS | {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": 2, "max_seq_len": POSITIONS,
        "initializer_range": SPREAD,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}}),
    _row("dbrx_rope", "DBRX, `rope_theta` as published", "Dbrx", _TOKENS | {
        "d_model": HIDDEN, "n_heads": HEADS, "n_layers": 2, "max_seq_len": POSITIONS,
        "initializer_range": SPREAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2}},
         renamed=RENAMED["dbrx"],
         remark="500000, in `attn_config`, where Transformers 5 does not look for it"),
    _row("gpt_oss", "gpt-oss", "GptOss", _DENSE | {
        "vocab_size": 201088, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _GPT_OSS_ROPE},
         has_own_prompt=True,
         remark="unquantized; a chat's prompt is vLLM's own (harmony)"),
    _row("deepseek", "DeepSeek V3", "DeepseekV3", _DENSE | {
        "num_key_value_heads": HEADS, "moe_intermediate_size": 64, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 32,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": _DEEPSEEK_ROPE}, renamed=RENAMED["deepseek"]),
    _row("deepseek_v2", "DeepSeek V2", "DeepseekV2", _DENSE | {
        "num_key_value_heads": HEADS, "moe_intermediate_size": 64, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
        "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": 32,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_parameters": _DEEPSEEK_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.707}},
         renamed=RENAMED["deepseek_v2"],
         remark="with YaRN, as published; without it this CPU build answers otherwise"),
    _row("llama4", "Llama 4 (text)", "Llama4", _DENSE | _HEAD_32 | {
        "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 256,
        "attention_chunk_size": 256}, config_class="Llama4TextConfig"),
    _row("llava_next", "LLaVA-NeXT", "LlavaNext", {
        "vision_config": tower(projection_dim=64), "text_config": _SIGHTED_TEXT,
        "image_token_index": FIRST_IMAGE_TOKEN,
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]},
         model_class="LlavaNextForConditionalGeneration", processor="llava_next"),
    _row("pixtral", "Pixtral", "Llava", {
        "vision_config": tower(image_size=64, model_type="pixtral"),
        "text_config": _SIGHTED_TEXT | {"model_type": "mistral", "sliding_window": None},
        "image_token_index": FIRST_IMAGE_TOKEN, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full"},
         model_class="LlavaForConditionalGeneration", processor="pixtral",
         remark="the layout of mistral-community/pixtral-12b"),
    _row("paligemma", "PaliGemma", "PaliGemma", {
        "vision_config": tower(model_type="siglip_vision_model", projection_dim=HIDDEN,
                               vision_use_head=False),
        "text_config": _DENSE | _HEAD_32 | _QUIET | {
            "model_type": "gemma", "vocab_size": VOCABULARY + 8},
        "image_token_index": FIRST_IMAGE_TOKEN, "projection_dim": HIDDEN, "hidden_size": HIDDEN},
         model_class="PaliGemmaForConditionalGeneration", processor="paligemma",
         remark="text alone is right; pictures are refused on a CPU"),
    _row("qwen3_vl", "Qwen3-VL", "Qwen3VL", {
        "vision_config": {
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
            "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0], "initializer_range": 0.2},
        "text_config": _DENSE | _HEAD_32 | {
            "vocab_size": VOCABULARY + 8, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6],
                "mrope_interleaved": True}},
        "image_token_id": FIRST_IMAGE_TOKEN, "video_token_id": FIRST_IMAGE_TOKEN + 1,
        "vision_start_token_id": FIRST_IMAGE_TOKEN + 2,
        "vision_end_token_id": FIRST_IMAGE_TOKEN + 3},
         model_class="Qwen3VLForConditionalGeneration", processor="qwen3_vl"),
    _row("phi3_v", "Phi-3-Vision", "Phi3", _DENSE | {"vocab_size": 32064},
         model_class="SightedPhi3", processor="phi3_v", renamed=RENAMED["phi3_v"],
         options=TRUSTED,
         remark="processor code in the folder, ours and not the published one"),
    _row("mllama", "Llama 3.2 Vision, text", "Mllama", _MLLAMA,
         model_class="MllamaForConditionalGeneration",
         remark="pictures are refused, see below"),
    _row("mllama_sees", "Llama 3.2 Vision, pictures", "Mllama", _MLLAMA,
         model_class="MllamaForConditionalGeneration", processor="mllama"),
    _row("t5", "T5", "T5", _T5, prepared=spread, model_class="T5ForConditionalGeneration"),
    _row("flan_t5", "Flan-T5, T5 v1.1", "T5", _T5 | {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, prepared=spread, seed=1,
         model_class="T5ForConditionalGeneration"),
    _row("bart", "BART", "Bart", _TOKENS | {
        "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256,
        "decoder_ffn_dim": 256, "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS, "max_position_embeddings": POSITIONS,
        "init_std": SPREAD, "decoder_start_token_id": 2, "forced_eos_token_id": None},
         prepared=spread, seed=1, model_class="BartForConditionalGeneration"),
    _quantized("int8", "compressed-tensors, int8 W8A8"),
    _quantized("fp8", "compressed-tensors, fp8 W8A8"),
    _quantized("awq", "AWQ, 4 bits", dtype="fp16"),
    # With seed 0 the two likeliest words are 0.01 apart at one step: 16 bits toss a coin.
    _quantized("gptq", "GPTQ, 4 bits", dtype="fp16", seed=1),
    _row("quantized_online_fp8", "`option.quantize=fp8` on a plain checkpoint", "Llama", _DENSE,
         prepared=REFERENCES["fp8"], group="quantization",
         options={"OPTION_QUANTIZE": "fp8", "OPTION_DTYPE": "bf16"}),
    _row("quantized_experts_int8", "`option.quantize=experts_int8` on a mixture", "Mixtral",
         _DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2}, group="quantization",
         options={"OPTION_QUANTIZE": "experts_int8", "OPTION_DTYPE": "bf16"}),
)  # fmt: skip


def build(row: Architecture, folder: Path) -> Reference:
    """Write the checkpoint of `row` into `folder`; returns what it must equal."""
    torch.manual_seed(zlib.crc32(row.name.encode()) + row.seed)
    config_class = getattr(transformers, row.config_class or f"{row.kind}Config")
    config = config_class(**row.config)
    config._attn_implementation = row.attention
    own = OWN_CLASSES.get(row.reference)
    model = (own or getattr(transformers, row.reference))(config).to(torch.float32).eval()
    _shake(model)
    if row.prepared is not None:
        with torch.no_grad():
            row.prepared(model)
    write(row, model, folder)
    if row.tokenizer:
        return Reference(model, mistral.write_tokenizer(row.tokenizer, folder))
    if row.processor:
        processor = write_processor(row.processor, folder)
        return Reference(model, processor.tokenizer, processor)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL_DIR / name, folder / name)
    return Reference(model, AutoTokenizer.from_pretrained(DEMO_MODEL_DIR))


def write(row: Architecture, model: Any, folder: Path) -> None:
    """Write weights and configuration under the names that the family has."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if row.renamed is not None:
        _rename(row, folder)
    if row.processor:
        published_names(folder)


def _shake(model: Any) -> None:
    """Move biases and norms off their constants, and experts that start empty off nothing.

    Embeddings are left alone; every other matrix is at least as wide as SPREAD, or a model with
    tied embeddings repeats its last token for ever.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.02)
            elif "embed" not in name and float(weight.std()) < SPREAD / 2:
                weight.normal_(0.0, SPREAD)


def _rename(row: Architecture, folder: Path) -> None:
    """Write the same numbers again under the family's own names and configuration."""
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert row.renamed is not None
    row.renamed(tensors, config)
    code = config.pop("remote_code", None)
    if code is not None:
        (folder / "configuration_family.py").write_text(code, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    if row.renamed is mistral.own_layout:
        mistral.write_own_files(folder, config)
