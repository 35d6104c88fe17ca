"""What config.json says of a decoder: the numbers that fit, length and memory depend on."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

_LENGTH_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_target_positions",
)  # fmt: skip
# Methods that quantize the experts of a mixture and leave every other layer as it is
# (vLLM 0.32: config/quantization.py, quantization/experts_int8.py).
EIGHT_BITS: Final = "int8_per_channel_weight_only"  # what LMI's 8-bit methods become
EXPERTS_ONLY: Final = ("experts_int8", EIGHT_BITS)
# Rope kinds whose max_position_embeddings already is the scaled length (vLLM's rule).
_UNSCALED_ROPE: Final = ("default", "llama3", "su", "longrope", "mrope", "proportional")
_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1, "auto": 2,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of one model; None where config.json does not say."""

    architectures: tuple[str, ...]
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    hidden_size: int | None
    intermediate_size: int | None
    vocabulary: int | None
    longest: int | None  # tokens
    dtype: str
    quant_method: str | None
    latent_size: int | None  # per token and layer, of models with latent attention (MLA)
    is_mixture: bool
    has_own_code: bool

    @property
    def kv_values_per_token_and_layer(self) -> int | None:
        """Numbers the KV cache keeps for one token in one layer, over all heads."""
        if self.latent_size is not None:
            return self.latent_size
        if self.kv_heads is None or self.head_size is None:
            return None
        return 2 * self.kv_heads * self.head_size


def read_shape(config: Mapping[str, object]) -> ModelShape:
    """The shape that `config` (or the text part of a multimodal one) describes."""
    text = config.get("text_config")
    body: Mapping[str, object] = {**config, **text} if isinstance(text, dict) else config
    heads = _number(body, "num_attention_heads", "n_head", "num_heads")
    hidden = _number(body, "hidden_size", "n_embd", "d_model")
    head_size = _number(body, "head_dim")
    if head_size is None and heads and hidden:
        head_size = hidden // heads
    quantization = body.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    architectures = config.get("architectures")
    return ModelShape(
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        layers=_number(body, "num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=_number(body, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads,
        head_size=head_size,
        hidden_size=hidden,
        intermediate_size=_number(body, "intermediate_size", "n_inner", "ffn_dim"),
        vocabulary=_number(body, "vocab_size"),
        longest=_longest(body),
        dtype=str(body.get("dtype") or body.get("torch_dtype") or "auto").removeprefix("torch."),
        quant_method=str(method).lower() if method else None,
        latent_size=_latent_size(body),
        is_mixture=_is_mixture(body),
        has_own_code="auto_map" in config,
    )


def _number(body: Mapping[str, object], *keys: str) -> int | None:
    """The first of `keys` that holds a number above 0."""
    for key in keys:
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _is_mixture(body: Mapping[str, object]) -> bool:
    """Whether the model has experts; DBRX counts them in a table of its own."""
    inner = body.get("ffn_config")
    counted = {**body, **inner} if isinstance(inner, dict) else body
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return _number(counted, *names) is not None


def _latent_size(body: Mapping[str, object]) -> int | None:
    """Numbers per token and layer of a model with latent attention."""
    rank, rope = _number(body, "kv_lora_rank"), _number(body, "qk_rope_head_dim")
    return rank + (rope or 0) if rank is not None else None


def _longest(body: Mapping[str, object]) -> int | None:
    """The longest sequence, rope scaling counted as vLLM counts it."""
    lengths = [number for key in _LENGTH_KEYS if (number := _number(body, key))]
    if not lengths:
        return None
    rope = body.get("rope_scaling") or body.get("rope_parameters")
    if not isinstance(rope, dict):
        return min(lengths)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor = rope.get("factor")
    if kind in _UNSCALED_ROPE or not isinstance(factor, int | float):
        return min(lengths)
    original = rope.get("original_max_position_embeddings")
    base = original if kind == "yarn" and isinstance(original, int) else min(lengths)
    return int(base * factor)


def bytes_per_value(dtype: str) -> float:
    """Bytes of one number of `dtype`; 2 where the name is not known."""
    return _BYTES.get("fp8" if dtype.startswith("fp8") else dtype, 2)
