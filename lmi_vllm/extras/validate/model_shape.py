"""The shape of a decoder from config.json: the numbers that the checks and the estimate need.

Its heads also decide over how many devices it can be split: vLLM gives each the same number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import Checkpoint, own_engine, read_checkpoint, text_part
from lmi_vllm.extras.validate.kv_cache import AttentionLayers, attention_layers
from lmi_vllm.extras.validate.weights import Weights, count_weights, number_of
from lmi_vllm.translate.draft import ArgumentDraft

_LENGTH_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_target_positions",
)  # fmt: skip
# Rope kinds whose max_position_embeddings already is the scaled length (vLLM's rule).
_UNSCALED_ROPE: Final = ("default", "llama3", "su", "longrope", "mrope", "proportional")
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
        longest=_longest(body),
        dtype=str(body.get("dtype") or body.get("torch_dtype") or "auto").removeprefix("torch."),
        quant_method=checkpoint.quant_method,
        latent_size=_latent_size(body),
        is_mixture=checkpoint.is_mixture,
        has_own_code="auto_map" in config,
        attention=attention_layers(config),
        weights=count_weights(config),
    )


def _latent_size(body: Mapping[str, object]) -> int | None:
    """Return the values per token and layer of latent attention (MLA); None for other models."""
    rank, rope = number_of(body, "kv_lora_rank"), number_of(body, "qk_rope_head_dim")
    return rank + (rope or 0) if rank is not None else None


def _longest(body: Mapping[str, object]) -> int | None:
    """Return the longest sequence in tokens, with rope scaling as vLLM applies it."""
    lengths = [number for key in _LENGTH_KEYS if (number := number_of(body, key))]
    if not lengths:
        return None
    rope = body.get("rope_scaling") or body.get("rope_parameters")
    # Gemma 3 states the scaled length (vLLM's rule).
    if not isinstance(rope, dict) or str(body.get("model_type")).startswith("gemma3"):
        return min(lengths)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    factor = rope.get("factor")
    if kind in _UNSCALED_ROPE or not isinstance(factor, int | float):
        return min(lengths)
    original = rope.get("original_max_position_embeddings")
    base = original if kind == "yarn" and isinstance(original, int) else min(lengths)
    return int(base * factor)


def bytes_per_value(dtype: str) -> float:
    """Return the bytes of one value of `dtype`; 2 where the name is not known."""
    return _BYTES.get("fp8" if dtype.startswith("fp8") else dtype, 2)


def head_counts(body: Mapping[str, object]) -> tuple[int | None, int | None]:
    """Return the attention heads and the KV heads of a decoder; None where they are not stated."""
    heads = number_of(body, "num_attention_heads", "n_head", "num_heads")
    return heads, number_of(body, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def divides(heads: int, kv_heads: int, devices: int) -> bool:
    """Whether each device gets as many heads, and its part of the KV heads or one of them."""
    more, fewer = max(devices, kv_heads), min(devices, kv_heads)
    return heads % devices == 0 and more % fewer == 0


def offer_sizes(draft: ArgumentDraft) -> None:
    """Say which numbers of devices `max` may mean; any where the heads are not known."""
    heads, kv_heads = _counts(draft)
    if heads and kv_heads:
        found = (size for size in range(1, heads + 1) if divides(heads, kv_heads, size))
        draft.tensor_sizes = tuple(found)


def refuse_size(draft: ArgumentDraft) -> None:
    """Note an error where vLLM would refuse to split the heads: its start takes half a minute."""
    tensor, (heads, kv_heads) = draft.values.get("tensor_parallel_size"), _counts(draft)
    if isinstance(tensor, int) and heads and kv_heads and heads % tensor:
        fitting = (str(n) for n in range(1, heads + 1) if divides(heads, kv_heads, n))
        draft.fail(
            f"tensor_parallel_size={tensor} does not divide the model's {heads} attention heads; "
            f"possible are {', '.join(fitting)}",
            draft.settings.model.details.tensor_parallel_degree,
        )


def _counts(draft: ArgumentDraft) -> tuple[int | None, int | None]:
    """The heads of a model that vLLM runs, with what `hf_overrides` changes."""
    if not draft.config or own_engine(draft.architectures, draft.values) is not None:
        return None, None
    overrides = draft.values.get("hf_overrides")
    changes = overrides if isinstance(overrides, Mapping) else {}
    return head_counts({**text_part(draft.config), **changes})
