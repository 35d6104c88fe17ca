"""Families that Transformers has no class for: known weights under the family's own names."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_CODE: Final = """\
from transformers import PretrainedConfig


class FamilyConfig(PretrainedConfig):
    model_type = "{model_type}"
"""


# What the published configurations of these families state; what a class needs beyond that must
# come from us.
_STATED: Final = (
    "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
    "rms_norm_eps", "tie_word_embeddings", "vocab_size", "dtype",
)  # fmt: skip


def _family(config: Config, architecture: str, model_type: str, **more: object) -> None:
    """Make `config` the family's: its own names, and a configuration class beside the weights."""
    stated = {name: config[name] for name in _STATED if name in config}
    config.clear()
    config.update(stated)
    config["architectures"] = [architecture]
    config["model_type"] = model_type
    config["auto_map"] = {"AutoConfig": "configuration_family.FamilyConfig"}
    config["remote_code"] = _CODE.format(model_type=model_type)
    config.update(more)


def _layers(tensors: Tensors) -> int:
    """How many layers there are."""
    found = [match for match in map(_LAYER.match, tensors) if match]
    return 1 + max(int(match.group(1)) for match in found)


def _aquila(tensors: Tensors, config: Config) -> None:
    _family(config, "AquilaModel", "aquila")


def _aquila2(tensors: Tensors, config: Config) -> None:
    groups = config["num_key_value_heads"]
    _family(config, "AquilaForCausalLM", "aquila", num_key_value_heads=groups)


def _internlm(tensors: Tensors, config: Config) -> None:
    rotary = {"base": 10000, "type": "dynamic"}
    _family(config, "InternLMForCausalLM", "internlm", bias=True, rotary=rotary)


def _decilm(tensors: Tensors, config: Config) -> None:
    """The first layer has half as many key-value heads: the reference has each of them twice."""
    heads, size = config["num_key_value_heads"], config["head_dim"]
    _family(config, "DeciLMForCausalLM", "deci", rope_theta=10000,
            num_key_value_heads_per_layer=[heads // 2, heads])  # fmt: skip
    for part in "kv":
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name].unflatten(0, (heads, size))[::2].flatten(0, 1)


def same_heads(model: Any) -> None:
    """Give the first layer of a Llama each second key-value head of its own, twice."""
    attention, size = model.model.layers[0].self_attn, model.config.head_dim
    for projection in (attention.k_proj, attention.v_proj):
        heads = projection.weight.unflatten(0, (-1, size))
        projection.weight.copy_(heads[::2].repeat_interleave(2, dim=0).flatten(0, 1))


def _baichuan(tensors: Tensors, config: Config) -> None:
    _family(config, "BaiChuanForCausalLM", "baichuan", model_max_length=1024)
    _packed(tensors)


def _baichuan2(tensors: Tensors, config: Config) -> None:
    """The head's rows have any length; the reference's have one."""
    _family(config, "BaichuanForCausalLM", "baichuan", model_max_length=1024, z_loss_weight=0)
    _packed(tensors)
    rows = tensors["lm_head.weight"].shape[0]
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * torch.linspace(0.5, 3, rows)[:, None]


def _baichuan_13b(tensors: Tensors, config: Config) -> None:
    """As published, no `max_position_embeddings`: ALiBi needs none."""
    _family(config, "BaichuanForCausalLM", "baichuan", model_max_length=1024)
    del config["max_position_embeddings"]
    _packed(tensors)


def _baichuan2_13b(tensors: Tensors, config: Config) -> None:
    _baichuan2(tensors, config)
    del config["max_position_embeddings"]


def with_alibi(model: Any) -> None:
    """Give a Llama ALiBi in the place of rotary positions.

    A key's bias is its slope times its index: what all keys of a row have in common, the softmax
    does not see.
    """
    slopes = torch.tensor(_slopes(model.config.num_attention_heads))[None, :, None, None]

    def biased(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        kwargs["attention_mask"] = mask + slopes * torch.arange(mask.shape[-1])
        cosine, sine = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = torch.ones_like(cosine), torch.zeros_like(sine)
        return args, kwargs

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(biased, with_kwargs=True)


def with_alibi_and_unit_head(model: Any) -> None:
    """Both."""
    with_alibi(model)
    unit_head(model)


def _slopes(heads: int) -> list[float]:
    """ALiBi's slopes; a number of heads between two powers of two takes every other of the next."""
    power = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return own + ([] if power == heads else _slopes(2 * power)[::2][: heads - power])


def unit_head(model: Any) -> None:
    """Give the head rows of length one, times what keeps the answer from being a coin toss."""
    model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))


def _packed(tensors: Tensors) -> None:
    for layer in range(_layers(tensors)):
        start = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{start}{part}_proj.weight") for part in "qkv"]
        tensors[f"{start}W_pack.weight"] = torch.cat(parts)


def _qwen(tensors: Tensors, config: Config) -> None:
    """Qwen2's layer, attention in one tensor; the width counts both halves of the gated layer."""
    qwen2 = dict(config)
    _family(config, "QWenLMHeadModel", "qwen", layer_norm_epsilon=qwen2["rms_norm_eps"],
            intermediate_size=2 * qwen2["intermediate_size"], seq_length=1024, kv_channels=32,
            rotary_emb_base=10000, rotary_pct=1.0, no_bias=True, use_dynamic_ntk=True,
            use_logn_attn=True)  # fmt: skip
    for name in ("rms_norm_eps", "max_position_embeddings", "hidden_act"):
        del config[name]
    for layer in range(_layers(tensors)):
        start = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{start}{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{start}c_attn.{kind}"] = torch.cat(parts)
    names = {
        "self_attn.o_proj": "attn.c_proj", "self_attn.c_attn": "attn.c_attn",
        "mlp.up_proj": "mlp.w1", "mlp.gate_proj": "mlp.w2", "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
        "model.layers": "transformer.h", "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
    }  # fmt: skip
    _replace(tensors, names)


def _internlm2(tensors: Tensors, config: Config) -> None:
    """Queries of a group lie before the group's key and value."""
    groups, size = config["num_key_value_heads"], config["head_dim"]
    _family(config, "InternLM2ForCausalLM", "internlm2", bias=False, num_key_value_heads=groups,
            rope_theta=10000)  # fmt: skip
    for layer in range(_layers(tensors)):
        old, new = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.attention."
        parts = [
            tensors.pop(f"{old}{part}_proj.weight").view(groups, -1, size, config["hidden_size"])
            for part in "qkv"
        ]
        tensors[f"{new}wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 2)
        tensors[f"{new}wo.weight"] = tensors.pop(f"{old}o_proj.weight")
    names = {
        "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings",
        "lm_head": "output",
    }  # fmt: skip
    _replace(tensors, names)


def _chatglm(tensors: Tensors, config: Config) -> None:
    """GLM is ChatGLM's grandchild: the same layer, with queries, keys and values apart."""
    for layer in range(_layers(tensors)):
        start = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"{start}{part}_proj.{kind}") for part in "qkv"]
            tensors[f"{start}query_key_value.{kind}"] = torch.cat(parts)
    names = {
        "self_attn.o_proj": "self_attention.dense", "self_attn": "self_attention",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h",
        "model.layers": "transformer.encoder.layers",
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    }  # fmt: skip
    _replace(tensors, names)
    glm = dict(config)
    config.clear()
    config.update(
        architectures=["ChatGLMModel"], model_type="chatglm", num_layers=glm["num_hidden_layers"],
        padded_vocab_size=glm["vocab_size"], vocab_size=glm["vocab_size"],
        hidden_size=glm["hidden_size"], ffn_hidden_size=glm["intermediate_size"],
        kv_channels=glm["head_dim"], num_attention_heads=glm["num_attention_heads"],
        seq_length=1024, multi_query_attention=True,
        multi_query_group_num=glm["num_key_value_heads"], add_qkv_bias=True,
        add_bias_linear=False, original_rope=True, rmsnorm=True, post_layer_norm=True,
        layernorm_epsilon=glm["rms_norm_eps"], torch_dtype="float32", eos_token_id=1,
        pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip


def _chatglm_6b(tensors: Tensors, config: Config) -> None:
    """The first generation as it states itself; its tensors are never reached."""
    width = config["hidden_size"]
    more = {"num_layers": 2, "inner_hidden_size": 4 * width, "position_encoding_2d": True,
            "max_sequence_length": 1024, "gmask_token_id": 3, "mask_token_id": 4,
            "layernorm_epsilon": 1e-5, "pre_seq_len": None, "quantization_bit": 0}  # fmt: skip
    _family(config, "ChatGLMModel", "chatglm", **more)
    for name in ("num_hidden_layers", "intermediate_size", "max_position_embeddings"):
        del config[name]
    for name in list(tensors):
        weight = tensors.pop(name)
        if name == "model.embed_tokens.weight":
            tensors["transformer.word_embeddings.weight"] = weight


def _phi3_v(tensors: Tensors, config: Config) -> None:
    """The tower's width and picture are fixed in vLLM; `layer_idx` keeps it to one layer."""
    groups = config["num_key_value_heads"]
    _family(config, "Phi3VForCausalLM", "phi3_v", num_key_value_heads=groups,
            img_processor={"name": "clip_vision_model", "image_dim_out": 1024, "layer_idx": 0,
                           "num_img_tokens": 144, "type_feature": "patch"},
            embd_layer={"use_hd_transform": True, "with_learnable_separator": True,
                        "hd_transform_order": "sub_glb"})  # fmt: skip
    config["auto_map"]["AutoProcessor"] = "processing_family.Phi3VProcessor"
    for name in [name for name in tensors if name.startswith("eyes.")]:
        new = name.replace("eyes.", "model.vision_embed_tokens.")
        if ".vision_model." not in new:  # Transformers 5 leaves it out
            new = new.replace(".img_processor.", ".img_processor.vision_model.")
        tensors[new] = tensors.pop(name)


def _dbrx(tensors: Tensors, config: Config) -> None:
    """Published configurations state the base of the rotary positions in `attn_config` alone."""
    del config["rope_parameters"]


def _deepseek(tensors: Tensors, config: Config) -> None:
    """What published configurations state and Transformers 5 leaves out; vLLM reads it."""
    config.update(topk_method="noaux_tc", scoring_func="sigmoid")


def _deepseek_v2(tensors: Tensors, config: Config) -> None:
    """The same of the second generation."""
    config.update(scoring_func="softmax", norm_topk_prob=False)


def _replace(tensors: Tensors, names: Mapping[str, str]) -> None:
    """Rename tensors by parts of their names, in the order of `names`."""
    for old in list(tensors):
        new = old
        for before, after in names.items():
            new = new.replace(before, after)
        tensors[new] = tensors.pop(old)


RENAMED: Final[Mapping[str, Callable[[Tensors, Config], None]]] = MappingProxyType(
    {
        "aquila": _aquila,
        "aquila2": _aquila2,
        "baichuan": _baichuan,
        "baichuan2": _baichuan2,
        "baichuan_13b": _baichuan_13b,
        "baichuan2_13b": _baichuan2_13b,
        "chatglm": _chatglm,
        "chatglm_6b": _chatglm_6b,
        "dbrx": _dbrx,
        "decilm": _decilm,
        "deepseek": _deepseek,
        "deepseek_v2": _deepseek_v2,
        "internlm": _internlm,
        "internlm2": _internlm2,
        "phi3_v": _phi3_v,
        "qwen": _qwen,
    }
)
