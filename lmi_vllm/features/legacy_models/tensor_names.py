"""Names of tensors and of an adapter's modules: of the family, and of the class that serves it.

vLLM asks a class's `hf_to_vllm_mapper` for the modules of an adapter. One that must not be found is
given a name that no module has: the adapter is refused (`workarounds.ignored_modules`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

Weights = Iterable[tuple[str, torch.Tensor]]

QWEN_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transformer.h.": "model.layers.",
        "transformer.wte.": "model.embed_tokens.",
        "transformer.ln_f.": "model.norm.",
        ".ln_1.": ".input_layernorm.",
        ".ln_2.": ".post_attention_layernorm.",
        ".attn.c_proj.": ".self_attn.o_proj.",
        ".mlp.w1.": ".mlp.up_proj.",
        ".mlp.w2.": ".mlp.gate_proj.",  # modeling_qwen.py: w1(x) * silu(w2(x))
        ".mlp.c_proj.": ".mlp.down_proj.",
    }
)
MPT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transformer.blocks.": "transformer.h.",
        "transformer.wte.": "transformer.word_embeddings.",
        "transformer.norm_f.": "transformer.ln_f.",
        ".norm_1.": ".input_layernorm.",
        ".norm_2.": ".post_attention_layernorm.",
        ".attn.Wqkv.": ".self_attention.query_key_value.",
        ".attn.out_proj.": ".self_attention.dense.",
        ".ffn.up_proj.": ".mlp.dense_h_to_4h.",
        ".ffn.down_proj.": ".mlp.dense_4h_to_h.",
    }
)
MLLAMA_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "language_model.model.": "model.",  # as published
        "model.language_model.": "model.",  # as Transformers 5 has it
        "language_model.lm_head.": "lm_head.",
    }
)
DISTILBERT_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "distilbert.": "",
        "transformer.layer.": "encoder.layer.",
        ".attention.q_lin.": ".attention.self.query.",
        ".attention.k_lin.": ".attention.self.key.",
        ".attention.v_lin.": ".attention.self.value.",
        ".attention.out_lin.": ".attention.output.dense.",
        ".sa_layer_norm.": ".attention.output.LayerNorm.",
        ".ffn.lin1.": ".intermediate.dense.",
        ".ffn.lin2.": ".output.dense.",
        ".output_layer_norm.": ".output.LayerNorm.",
        "pre_classifier.": "bert.pooler.dense.",
    }
)
# Queries, keys and values are one weight of an adapter, as they are of the checkpoint.
FUSED_QKV: Final[Mapping[str, list[str]]] = MappingProxyType(
    {"qkv_proj": ["qkv_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
)


def renumbered_layers(count: int, left_out: Iterable[int]) -> dict[re.Pattern[str], str]:
    """Return patterns and new names of the modules of `count` layers, some of them left out.

    Those of a layer that is left out are given a name that no module has. In this order: a new
    number is never one that comes later.
    """
    gone, found = set(left_out), {}
    for number in range(count):
        new = f"model.layers.{number - sum(other < number for other in gone)}."
        place = re.compile(
            rf"^(?:language_model\.model|model\.language_model|model)\.layers\.{number}\."
        )
        found[place] = f"model.picture_layers.{number}." if number in gone else new
    return found


def split_qkv(weights: Weights, fused: str = ".self_attn.W_pack.") -> Iterator[Any]:
    """Yield `weights` with each fused tensor split into queries, keys and values."""
    for name, weight in weights:
        if fused not in name:
            yield name, weight
            continue
        for part, piece in zip("qkv", weight.chunk(3), strict=True):
            yield name.replace(fused, f".self_attn.{part}_proj."), piece


def renamed(weights: Weights, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `weights` under the names of another family."""
    for name, weight in weights:
        new = name
        for before, after in names.items():
            new = new.replace(before, after)
        yield new, weight
