"""The shape of a decoder from config.json: the numbers that the checks and the estimate need."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import (
    Checkpoint,
    head_counts,
    number_of,
    read_checkpoint,
    text_part,
)
from lmi_vllm.checks.model_length import longest_sequence
from lmi_vllm.features.validate.kv_cache import AttentionLayers, attention_layers
from lmi_vllm.features.validate.weights import Weights, count_weights

_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4, "fp8": 1, "auto": 2,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape(Checkpoint):
    """The shape of one model; None where config.json does not say."""

    architectures: tuple[str, ...]
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    longest: int | None  # tokens
    dtype: str
    latent_size: int | None  # per token and layer, of models with latent attention (MLA)
    has_own_code: bool
    family: str  # model_type, of the text part where there is one
    attention: AttentionLayers | None
    weights: Weights | None

    @property
    def kv_values_per_token_and_layer(self) -> int | None:
        """Values in the KV cache for one token in one layer, over all heads."""
        if self.latent_size is not None:
            return self.latent_size
        if self.kv_heads is None or self.head_size is None:
            return None
        return 2 * self.kv_heads * self.head_size


def read_shape(config: Mapping[str, object]) -> ModelShape:
    """Return the shape in `config`, or in the text part of a multimodal one."""
    body, checkpoint = text_part(config), read_checkpoint(config)
    heads, kv_heads = head_counts(body)
    hidden = number_of(body, "hidden_size", "n_embd", "d_model")
    head_size = number_of(body, "head_dim")
    if head_size is None and heads and hidden:
        head_size = hidden // heads
    architectures = config.get("architectures")
    return ModelShape(
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        layers=number_of(body, "num_hidden_layers", "n_layer", "num_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        longest=longest_sequence(config),
        dtype=str(body.get("dtype") or body.get("torch_dtype") or "auto").removeprefix("torch."),
        quant_method=checkpoint.quant_method,
        latent_size=_latent_size(body),
        is_mixture=checkpoint.is_mixture,
        has_own_code="auto_map" in config,
        family=str(body.get("model_type") or ""),
        attention=attention_layers(config),
        weights=count_weights(config),
    )


def _latent_size(body: Mapping[str, object]) -> int | None:
    """Return the values per token and layer of latent attention (MLA); None for other models."""
    rank, rope = number_of(body, "kv_lora_rank"), number_of(body, "qk_rope_head_dim")
    return rank + (rope or 0) if rank is not None else None


def bytes_per_value(dtype: str) -> float:
    """Return the bytes of one value of `dtype`; 2 where the name is not known."""
    return _BYTES.get("fp8" if dtype.startswith("fp8") else dtype, 2)
