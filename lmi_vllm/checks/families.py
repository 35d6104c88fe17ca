"""Families whose config.json has other names for its numbers, or leaves out or means others."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.class_defaults import class_defaults

Config = Mapping[str, object]
# Other names of a number: where one is stated, the default of the class is not meant.
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "hidden_size": ("n_embd", "n_embed", "d_model"),
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("n_head", "n_heads", "num_heads"),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
        "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
        "max_position_embeddings": (
            "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
            "max_target_positions",
        ),
    }
)  # fmt: skip


def in_common_names(body: Config) -> Config:
    """`body`, with the numbers of its family under the names that most families use.

    Multi-query models have one KV head, or a few groups; vLLM reads them so, too.
    """
    family = str(body.get("model_type") or "").lower()
    body = {**_left_out(body, family), **body}
    reader = _FAMILIES.get(family)
    found = {} if reader is None else reader(body)
    return {**body, **{name: value for name, value in found.items() if value is not None}}


def _left_out(body: Config, family: str) -> Config:
    """The numbers that Transformers did not save, because they are those of its class."""
    defaults = class_defaults().get(family, {})
    return {
        name: value
        for name, value in defaults.items()
        if not any(other in body for other in _OTHER_NAMES.get(name, ()))
    }


def _part(body: Config, name: str) -> Config:
    part = body.get(name)
    return part if isinstance(part, Mapping) else {}


def _times(value: object, factor: object) -> int | None:
    both = isinstance(value, int) and isinstance(factor, int)
    return int(value) * int(factor) if both else None  # type: ignore[call-overload]


def _falcon(body: Config) -> Config:
    heads = body.get("num_attention_heads") or body.get("n_head")
    kv_heads = body.get("num_kv_heads") or body.get("n_head_kv") or heads
    if body.get("multi_query") is True and body.get("new_decoder_architecture") is not True:
        kv_heads = 1
    width = body.get("ffn_hidden_size") or _times(body.get("hidden_size"), 4)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "intermediate_size": width, "model_type": "falcon"}  # fmt: skip


def _gpt2(body: Config) -> Config:
    is_shared = body.get("model_type") == "gpt_bigcode" and body.get("multi_query") is not False
    width = body.get("n_inner") or _times(body.get("n_embd"), 4)
    return {"num_key_value_heads": 1 if is_shared else None, "intermediate_size": width}


def _bloom(body: Config) -> Config:
    hidden = body.get("hidden_size") or body.get("n_embed")
    heads = body.get("num_attention_heads") or body.get("n_head")
    return {"hidden_size": hidden, "num_attention_heads": heads,
            "intermediate_size": _times(hidden, 4)}  # fmt: skip


def _chatglm(body: Config) -> Config:
    groups = body.get("multi_query_group_num") if body.get("multi_query_attention") else None
    return {"num_key_value_heads": groups, "intermediate_size": body.get("ffn_hidden_size"),
            "head_dim": body.get("kv_channels"),
            "vocab_size": body.get("padded_vocab_size")}  # fmt: skip


def _mpt(body: Config) -> Config:
    attention = _part(body, "attn_config")
    kind, heads = attention.get("attn_type"), body.get("n_heads")
    shared = {"multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads")}
    return {"num_attention_heads": heads, "num_key_value_heads": shared.get(str(kind), heads),
            "num_hidden_layers": body.get("n_layers"),
            "intermediate_size": _times(body.get("d_model"), body.get("expansion_ratio", 4)),
            }  # fmt: skip


def _dbrx(body: Config) -> Config:
    experts = _part(body, "ffn_config")
    return {"num_attention_heads": body.get("n_heads"), "num_hidden_layers": body.get("n_layers"),
            "num_key_value_heads": _part(body, "attn_config").get("kv_n_heads"),
            "num_local_experts": experts.get("moe_num_experts"),
            "intermediate_size": experts.get("ffn_hidden_size")}  # fmt: skip


def _llama4(body: Config) -> Config:
    """A shared expert beside the others; layers without experts are wider."""
    return {"intermediate_size": body.get("intermediate_size_mlp"), "n_shared_experts": 1,
            "moe_intermediate_size": body.get("intermediate_size"),
            "decoder_sparse_step": body.get("interleave_moe_layer_step")}  # fmt: skip


def _qwen(body: Config) -> Config:
    """Its two up projections are stated as one."""
    both = body.get("intermediate_size")
    return {"intermediate_size": both // 2 if isinstance(both, int) else None,
            "head_dim": body.get("kv_channels")}  # fmt: skip


_FAMILIES: Final[Mapping[str, Callable[[Config], Config]]] = MappingProxyType(
    {
        "falcon": _falcon, "refinedweb": _falcon, "refinedwebmodel": _falcon, "gpt2": _gpt2,
        "gptj": _gpt2, "gpt_bigcode": _gpt2, "bloom": _bloom, "chatglm": _chatglm, "mpt": _mpt,
        "dbrx": _dbrx, "llama4": _llama4, "llama4_text": _llama4, "qwen": _qwen,
    }
)  # fmt: skip
