"""Size of the KV cache: layers with full attention, and layers with a sliding window."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm.checks.model import number_of, text_part

_BLOCK: Final = 16  # tokens of a block of the cache
# vLLM groups layers by the smaller kind, unless the larger one has less than this many times it.
_SAME_GROUP_RATIO: Final = 1.5
_GEMMA3_PATTERN: Final = 6  # every sixth layer has full attention
# Families that read a text in both directions at once: no step needs what an earlier one computed.
ENCODERS: Final = (
    "albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "eurobert",
    "jina_embeddings_v3", "mobilebert", "modernbert", "new", "nomic_bert", "roberta",
    "roberta-prelayernorm", "squeezebert", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
# Beginnings of the names of numbers that only layers without attention have.
_OTHER_LAYERS: Final = (
    "block_configs", "conv_L", "hybrid_override_pattern", "linear_", "lru_", "mamba_", "ssm_",
    "state_size",
)  # fmt: skip
_ATTENTION: Final = ("attention", "dense", "sparse", "moe")  # ends of what layer_types says of it


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Numbers of layers by attention; `window` in tokens, None where none is sliding."""

    full: int
    sliding: int = 0
    window: int | None = None

    def of_stage(self, stages: int) -> "AttentionLayers":
        """Return the layers of one of `stages` pipeline stages, rounded up."""
        return replace(self, full=-(-self.full // stages), sliding=-(-self.sliding // stages))


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache on one GPU: bytes of a token in all full layers, and in all sliding ones.

    vLLM keeps layers in groups of one size and rounds up; `full` and `sliding` include that.
    """

    full: int
    sliding: int = 0
    window: int = 0  # tokens that the sliding layers of one sequence hold at most

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that is inside the window of every layer."""
        return self.full + self.sliding

    def bytes_of(self, tokens: int) -> int:
        """Return the bytes of one sequence of `tokens`."""
        if not self.sliding:
            return tokens * self.full
        return tokens * self.full + (min(tokens, self.window) + _BLOCK) * self.sliding

    def longest(self, free: float) -> int:
        """Return the tokens of the longest sequence in `free` bytes; below 0 if none fits."""
        inside = int((free - _BLOCK * self.sliding) / max(self.bytes_per_token, 1))
        if not self.sliding or inside <= self.window:
            return inside
        if not self.full:
            return int(1e9)  # a window alone: a sequence of any length
        return int((free - (self.window + _BLOCK) * self.sliding) / self.full)


def attention_layers(config: Mapping[str, object]) -> AttentionLayers | None:
    """Return the attention layers of `config`; None where it does not say how many."""
    body = text_part(config)
    layers = number_of(body, "num_hidden_layers", "n_layer", "num_layers")
    if layers is None or has_other_layers(body):
        return None
    if body.get("model_type") in ENCODERS:
        return AttentionLayers(0)
    window = number_of(body, "sliding_window")
    if window is None or body.get("use_sliding_window") is False:
        return AttentionLayers(layers)
    sliding = _sliding_layers(body, layers)
    return AttentionLayers(layers - sliding, sliding, window if sliding else None)


def has_other_layers(body: Mapping[str, object]) -> bool:
    """Whether some layers are no attention and have a state instead, such as Mamba's."""
    named = body.get("layer_types")
    kinds = list(map(str, named)) if isinstance(named, list) else []
    is_other = any(not kind.endswith(_ATTENTION) or "linear" in kind for kind in kinds)
    return is_other or any(name.startswith(_OTHER_LAYERS) for name, value in body.items() if value)


def _sliding_layers(body: Mapping[str, object], layers: int) -> int:
    """Return how many of the layers have a sliding window."""
    named = body.get("layer_types")
    if isinstance(named, list):
        return sum(name == "sliding_attention" for name in named)
    family = str(body.get("model_type") or "")
    pattern = number_of(body, "sliding_window_pattern")
    if pattern is None:
        pattern = {"gemma2": 2, "gpt_oss": 2}.get(family)
    if pattern is None and family.startswith("gemma3"):
        pattern = _GEMMA3_PATTERN
    return layers - layers // pattern if pattern else layers


def kv_cache(layers: AttentionLayers, layer_bytes: float, in_flight: int) -> KvCache:
    """Return the cache of `layers`, each with `layer_bytes` for a token on this GPU.

    In sliding layers a sequence holds its window and the `in_flight` tokens of the running steps.
    """
    if not layers.sliding or layers.window is None:
        return KvCache(int(layers.full * layer_bytes))
    held = layers.window - 1 + in_flight
    if not layers.full:
        return KvCache(0, int(layers.sliding * layer_bytes), held)
    few, many = sorted((layers.full, layers.sliding))
    size = many if many < few * _SAME_GROUP_RATIO else few
    full, sliding = (-(-number // size) * size for number in (layers.full, layers.sliding))
    return KvCache(int(full * layer_bytes), int(sliding * layer_bytes), held)
