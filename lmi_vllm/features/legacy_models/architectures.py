"""Architectures that vLLM lacks and still runs under another name, set by `hf_overrides`.

Families whose layers are those of a class vLLM has: some with the same tensor names, the others
read by a class of ours (classes.py). All compared with Transformers (config/models.md;
CamemBERT: tests/contract/test_pooling.py). The user's own `hf_overrides` and `model_impl` win.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.translate.draft import ArgumentDraft

_Config = Mapping[str, object]
_ORIGIN: Final = Origin(OriginKind.DERIVED, "the model's architecture")


@dataclass(frozen=True, slots=True)
class Family:
    """The class that one architecture is served by.

    `fields` are further overrides, out of its config.json: None where this checkpoint is not of
    the shape that was compared, and vLLM's own answer stands.
    """

    served_as: str
    why: str
    fields: Callable[[_Config], _Config | None] = lambda _: {}
    lack: str = ""  # what vLLM's own class lacks, where it has one
    adapters_only: bool = False  # without them vLLM's own class is as good
    has_own_config: bool = False  # the class of its configuration is code of the model's


def _baichuan(config: _Config) -> _Config | None:
    """Return the overrides of 7B; None for 13B, which has ALiBi, no `max_position_embeddings`."""
    is_rotary = "max_position_embeddings" in config and config.get("hidden_size") != 5120  # noqa: PLR2004
    return {} if is_rotary else None


def _baichuan_alibi(config: _Config) -> _Config | None:
    """Return the overrides of 13B, which has `model_max_length` alone; None for others."""
    longest = config.get("model_max_length")
    if "max_position_embeddings" in config or not isinstance(longest, int):
        return None
    return {"max_position_embeddings": longest}


def _first_baichuan_alibi(config: _Config) -> _Config | None:
    """Return the overrides of the first generation of 13B; None for others."""
    return None if _is_second_baichuan(config) else _baichuan_alibi(config)


def _is_second_baichuan(config: _Config) -> bool:
    """Both generations of 13B have one name; the second states `z_loss_weight`."""
    return "z_loss_weight" in config or config.get("vocab_size") == 125696  # noqa: PLR2004


def _mllama(config: _Config) -> _Config | None:
    """Return no overrides where there are cross-attention layers to leave out; else None."""
    text = config.get("text_config")
    cross_attention = text.get("cross_attention_layers") if isinstance(text, Mapping) else None
    return {} if isinstance(cross_attention, list) and cross_attention else None


def _decilm(config: _Config) -> _Config | None:
    """Return the overrides of DeciLM-7B; None for later ones, whose `block_configs` vLLM reads."""
    counts = config.get("num_key_value_heads_per_layer")
    if not isinstance(counts, list) or not counts or not all(isinstance(n, int) for n in counts):
        return None
    most = max(counts)
    return {"num_key_value_heads": most} if all(n > 0 and most % n == 0 for n in counts) else None


def _qwen(config: _Config) -> _Config | None:
    """Return Qwen's fields under Qwen2's names; None where they are missing."""
    width, heads = config.get("intermediate_size"), config.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int):
        return None
    return {
        "intermediate_size": width // 2,  # Qwen counts both halves of its gated layer
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-6),
        "max_position_embeddings": config.get("seq_length", 8192),
    }


def _mpt(config: _Config) -> _Config | None:
    """Return the overrides of MPT whose attention equals BLOOM's; None for other variants."""
    attention = config.get("attn_config")
    known = attention if isinstance(attention, Mapping) else {}
    heads = config.get("n_heads")
    if not isinstance(heads, int) or heads < 1 or heads & (heads - 1):
        return None
    is_plain = (
        known.get("alibi", True) is True
        and known.get("alibi_bias_max", 8) == 8  # noqa: PLR2004
        and not any(known.get(name) for name in ("clip_qkv", "softmax_scale", "qk_ln", "prefix_lm"))
        and config.get("expansion_ratio", 4) == 4  # noqa: PLR2004
    )
    if not is_plain:
        return None
    return {
        "n_head": heads,
        "layer_norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "apply_residual_connection_post_layernorm": False,
    }


def _distilbert(config: _Config) -> _Config:
    """Return DistilBERT's fields under BERT's names."""
    return {
        "intermediate_size": config.get("hidden_dim", 3072),
        "hidden_act": config.get("activation", "gelu"),
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 1,
    }


def _gte(config: _Config) -> _Config | None:
    """Return no overrides for a gte v1.5 of the shape that vLLM's class computes; else None."""
    expected = {
        "hidden_act": "gelu", "layer_norm_type": "layer_norm", "position_embedding_type": "rope",
        "pack_qkv": True, "logn_attention_scale": False,
    }  # fmt: skip
    is_known = config.get("model_type") == "new" and all(
        config.get(name, value) == value for name, value in expected.items()
    )
    return {} if is_known else None


def _gte_ranker(config: _Config) -> _Config | None:
    """As `_gte`; None with two types of tokens, too: vLLM's class that ranks reads none."""
    types = config.get("type_vocab_size", 1)
    return _gte(config) if types in (0, 1) else None


def _gte_vectors(config: _Config) -> _Config | None:
    """As `_gte`; None with several labels, too: it classifies tokens, and is no model of vectors.

    gte-multilingual-base, which is one, names the class that classifies tokens, with one label.
    """
    labels = config.get("id2label")
    return None if isinstance(labels, Mapping) and len(labels) > 1 else _gte(config)


# Classes of LMI's families that vLLM has no LoRA layers for (0.31 to 0.33), or since when it has
# some. A start with adapters would end after the weights are fetched and loaded.
_NEVER: Final = ("BloomForCausalLM", "DbrxForCausalLM", "FalconForCausalLM", "GPT2LMHeadModel",
    "GPTJForCausalLM", "LmiDbrxForCausalLM", "LmiMptForCausalLM", "Phi3VForCausalLM")  # fmt: skip
LORA_SINCE: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType(
    dict.fromkeys(_NEVER, (99,)) | {"LmiDistilBertForSequenceClassification": (0, 33)}
)
_LLAMA: Final = (Family("LlamaForCausalLM", "same layers and tensor names"),)
_MPT: Final = (Family("LmiMptForCausalLM", "BLOOM's layers", _mpt),)
_ROBERTA: Final = (
    "same layers and tensor names; vLLM's Transformers backend misplaces its positions"
)
# Types of models whose positions start behind the padding token, as RoBERTa's do.
_SHIFTED: Final = ("camembert", "data2vec-text", "xmod")
_DISTILBERT: Final = "DistilBert"
_BERT: Final = "BERT's layers"
_GTE: Final = "gte v1.5 under vLLM's name of it"
_ALIBI: Final = "Llama's layers with ALiBi"
# The first family whose fields are not None counts.
FAMILIES: Final[Mapping[str, tuple[Family, ...]]] = MappingProxyType(
    {
        "AquilaForCausalLM": _LLAMA,  # gone since vLLM 0.24
        "AquilaModel": _LLAMA,
        **{
            f"Camembert{head}": (Family(f"Roberta{head}", _ROBERTA),)
            for head in ("Model", "ForMaskedLM", "ForSequenceClassification")
        },
        "Data2VecTextModel": (Family("RobertaModel", _ROBERTA),),
        **{
            f"DistilBert{head}": (Family("LmiDistilBertModel", _BERT, _distilbert),)
            for head in ("Model", "ForMaskedLM")
        },
        "DistilBertForSequenceClassification": (
            Family("LmiDistilBertForSequenceClassification", _BERT, _distilbert),
        ),
        "NewModel": (Family("GteNewModel", _GTE, _gte, has_own_config=True),),
        "NewForTokenClassification": (
            Family("GteNewModel", _GTE, _gte_vectors, has_own_config=True),
        ),
        "NewForSequenceClassification": (
            Family("GteNewForSequenceClassification", _GTE, _gte_ranker, has_own_config=True),
        ),
        "InternLMForCausalLM": _LLAMA,  # gone since vLLM 0.23; its `bias` is read
        "BaiChuanForCausalLM": (Family("LmiBaichuanForCausalLM", "Llama's layers", _baichuan),),
        "BaichuanForCausalLM": (
            Family("LmiBaichuan2ForCausalLM", "Llama's layers", _baichuan),
            Family("LmiBaichuanAlibiForCausalLM", _ALIBI, _first_baichuan_alibi),
            Family("LmiBaichuan2AlibiForCausalLM", _ALIBI, _baichuan_alibi),
        ),
        "MllamaForConditionalGeneration": (  # gone since vLLM 0.10.2
            Family("LmiMllamaTextForCausalLM", "text only, pictures are refused", _mllama),
        ),
        "QWenLMHeadModel": (Family("LmiQwenForCausalLM", "Qwen2's layers", _qwen),),
        "MptForCausalLM": _MPT,  # gone since vLLM 0.28
        "MPTForCausalLM": _MPT,
        "DeciLMForCausalLM": (
            Family(
                "LmiDeciLMForCausalLM", "Llama's layers, key-value heads repeated", _decilm,
                lack="cannot load it",
            ),
        ),
        "DbrxForCausalLM": (
            Family(
                "LmiDbrxForCausalLM", "its experts under the names vLLM has now",
                lack="cannot load it",
            ),
        ),
        "GPTBigCodeForCausalLM": (
            Family(
                "LmiGPTBigCodeForCausalLM", "adapters of its c_attn",
                lack="has no LoRA layer for it", adapters_only=True,
            ),
        ),
    }
)  # fmt: skip


def map_architecture(draft: ArgumentDraft) -> None:
    """Put the `hf_overrides` that the checkpoint needs, with a warning that names them."""
    if reason := _refusal(draft.architectures, draft.values):
        draft.fail(reason)
    mapped = _override(draft.architectures, draft.config, draft.values)
    if mapped is not None:
        family, overrides, sentence = mapped
        if family.has_own_config and draft.values.get("trust_remote_code") is not True:
            draft.fail(
                f"architecture {draft.architectures[0]} (config.json) needs "
                f"option.trust_remote_code=true: the class of its configuration is code of the "
                f"model's repository"
            )
        draft.put("hf_overrides", overrides, draft.origins.get("hf_overrides", _ORIGIN))
        draft.warn(sentence)
    elif _is_misplaced(draft.architectures, draft.config, draft.values):
        draft.fail(
            f"architecture {draft.architectures[0]} (config.json) cannot be served: vLLM "
            f"{load_release().release} has no class for it, and its Transformers backend counts "
            f"the model's positions from 0 instead of behind the padding token: every answer would "
            f"be wrong. Use a model of BERT's, RoBERTa's or XLM-RoBERTa's class"
        )
    _refuse_adapters(draft)


def _refuse_adapters(draft: ArgumentDraft) -> None:
    """Refuse LoRA on a class without layers for it."""
    overrides = draft.values.get("hf_overrides")
    named = overrides.get("architectures") if isinstance(overrides, Mapping) else None
    own = draft.architectures[0] if draft.architectures else ""
    served = str(named[0]) if isinstance(named, list) and named else own
    is_vllms = draft.values.get("model_impl") in (None, "auto", "vllm")
    if draft.values.get("enable_lora") is True and is_vllms and lacks_lora(served):
        draft.fail(
            f"{draft.label('enable_lora')}: vLLM has no LoRA layers for {own or served}; start "
            f"without it, or merge the adapter into the model's weights"
        )


def lacks_lora(name: str) -> bool:
    """Whether the installed vLLM has no LoRA layers for a class of LMI's families."""
    release = tuple(map(int, load_release().release.split(".")))
    return release < LORA_SINCE.get(name, ())


def _is_misplaced(
    architectures: tuple[str, ...], config: _Config, arguments: Mapping[str, object]
) -> bool:
    """Whether vLLM's Transformers backend would run an encoder at wrong positions.

    It shifts them where the model's type has `roberta` in it (transformers/legacy.py).
    """
    given = arguments.get("hf_overrides") or {}
    is_overridden = not isinstance(given, Mapping) or "architectures" in given
    if is_overridden or not architectures or architectures[0] in load_release().architectures:
        return False
    kind = config.get("model_type")
    return kind in _SHIFTED or (
        kind == "esm" and config.get("position_embedding_type", "absolute") == "absolute"
    )


def _refusal(architectures: tuple[str, ...], arguments: Mapping[str, object]) -> str:
    """Return why no class can serve the model; empty where one might, or the user chooses one."""
    release = load_release()
    is_chosen = any(
        arguments.get(name) for name in ("hf_overrides", "trust_remote_code")
    ) or arguments.get("model_impl", "auto") not in (None, "auto")
    own = next((name for name in architectures if name.startswith(_DISTILBERT)), None)
    if own is None or is_chosen or own in FAMILIES or own in release.architectures:
        return ""
    served = ", ".join(name for name in FAMILIES if name.startswith(_DISTILBERT))
    return (
        f"architecture {own} cannot be served: vLLM {release.release} has no DistilBERT, and its "
        f"Transformers backend does not find the attention of one; of DistilBERT, {served} are "
        f"served here"
    )


def _override(
    architectures: tuple[str, ...], config: _Config, arguments: Mapping[str, object]
) -> tuple[Family, _Config, str] | None:
    """Return the family, its overrides, and the warning; None where none is needed."""
    given = arguments.get("hf_overrides") or {}
    if not isinstance(given, Mapping) or "architectures" in given:
        return None
    if arguments.get("model_impl", "auto") not in (None, "auto"):
        return None
    if not architectures:
        return None
    own, release = architectures[0], load_release()
    fitting = (
        (family, fields)
        for family in FAMILIES.get(own, ())
        if (family.lack or own not in release.architectures)
        and (arguments.get("enable_lora") or not family.adapters_only)
        and (fields := family.fields(config)) is not None
    )
    family, fields = next(fitting, (None, {}))
    if family is None:
        return None
    lack = family.lack or f"has no {own}"
    sentence = (
        f"architecture {own} is served as {family.served_as} ({family.why}; vLLM "
        f"{release.release} {lack}); architectures in option.hf_overrides would win"
    )
    return family, {"architectures": [family.served_as], **fields, **given}, sentence
