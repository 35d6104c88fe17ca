"""What a token keeps in the KV cache: layers that look at everything, and layers with a window."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm.checks.model import number_of, text_part

_BLOCK: Final = 16  # tokens of one block of the cache
# One group as large as the other kind's where there are not many more layers in it (vLLM's rule).
_ALIKE: Final = 1.5
_GEMMA3_PATTERN: Final = 6  # every sixth layer sees everything


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers by how far they look back; `window` in tokens, None where none has one."""

    full: int
    sliding: int = 0
    window: int | None = None

    def of_stage(self, stages: int) -> "AttentionLayers":
        """The layers of one pipeline stage."""
        return replace(self, full=-(-self.full // stages), sliding=-(-self.sliding // stages))


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache on one GPU: bytes of a token in full layers, and more of it inside a window.

    vLLM keeps layers in groups of one size and rounds up; `full` and `sliding` include that.
    """

    full: int
    sliding: int = 0
    window: int = 0  # tokens that the sliding layers of one sequence hold at most

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every layer still sees."""
        return self.full + self.sliding

    def bytes_of(self, tokens: int) -> int:
        """Bytes of one sequence."""
        if not self.sliding:
            return tokens * self.full
        return tokens * self.full + (min(tokens, self.window) + _BLOCK) * self.sliding

    def longest(self, free: float) -> int:
        """Tokens of the longest single sequence in `free` bytes; below 0 where nothing fits."""
        inside = int((free - _BLOCK * self.sliding) / max(self.bytes_per_token, 1))
        if not self.sliding or inside <= self.window:
            return inside
        if not self.full:
            return int(1e9)  # a window alone: a sequence of any length
        return int((free - (self.window + _BLOCK) * self.sliding) / self.full)


def attention_layers(config: Mapping[str, object]) -> AttentionLayers | None:
    """The layers of `config`; None where it does not say how many."""
    body = text_part(config)
    layers = number_of(body, "num_hidden_layers", "n_layer", "num_layers")
    if layers is None:
        return None
    window = number_of(body, "sliding_window")
    if window is None or body.get("use_sliding_window") is False:
        return AttentionLayers(layers)
    sliding = _sliding_layers(body, layers)
    return AttentionLayers(layers - sliding, sliding, window if sliding else None)


def _sliding_layers(body: Mapping[str, object], layers: int) -> int:
    """How many of the layers have the window."""
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
    """The cache of `layers`, each keeping `layer_bytes` of a token on this GPU.

    A sequence holds its window and what a step adds: `in_flight` tokens.
    """
    if not layers.sliding or layers.window is None:
        return KvCache(int(layers.full * layer_bytes))
    held = layers.window - 1 + in_flight
    if not layers.full:
        return KvCache(0, int(layers.sliding * layer_bytes), held)
    few, many = sorted((layers.full, layers.sliding))
    size = many if many < few * _ALIKE else few
    full, sliding = (-(-number // size) * size for number in (layers.full, layers.sliding))
    return KvCache(int(full * layer_bytes), int(sliding * layer_bytes), held)
