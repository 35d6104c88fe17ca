"""How long a model's sequences may be, by its config.json, as vLLM derives it."""

from collections.abc import Iterator, Mapping
from typing import Final

from lmi_vllm.checks.model import number_of, text_part

# In vLLM the variable that makes a longer max_model_len a warning.
ALLOW_LONG: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_LENGTH_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
    "max_target_positions",
)  # fmt: skip
# Rope kinds whose max_position_embeddings already is the scaled length (vLLM's rule).
_UNSCALED_ROPE: Final = (
    "deepseek_llama_scaling", "deepseek_yarn", "default", "llama3", "longrope", "mrope",
    "proportional", "su", "yarn",
)  # fmt: skip


def overridden(config: Mapping[str, object], overrides: object) -> Mapping[str, object]:
    """Return `config` as vLLM reads it with `hf_overrides`, which may change its parts, too."""
    if not isinstance(overrides, Mapping):
        return config
    parts = {
        name: {**part, **value}
        for name, value in overrides.items()
        if isinstance(value, Mapping) and isinstance(part := config.get(name), Mapping)
    }
    return {**config, **overrides, **parts}


def longest_sequence(config: Mapping[str, object]) -> int | None:
    """Return the longest sequence in tokens, with rope scaling as vLLM applies it; None: unsaid."""
    body = text_part(config)
    lengths = [number for key in _LENGTH_KEYS if (number := number_of(body, key))]
    if stated := number_of(body, "model_max_length"):  # Command R; it wins in vLLM
        lengths = [stated]
    if not lengths:
        return None
    # Gemma 3 states the scaled length (vLLM's rule).
    factors = [] if str(body.get("model_type")).startswith("gemma3") else [*_factors(body)]
    return int(min(lengths) * (factors[-1] if factors else 1))


def _factors(body: Mapping[str, object]) -> Iterator[float]:
    """Yield the factors that lengthen a sequence: of all layers, or of each kind of layers."""
    rope = body.get("rope_scaling") or body.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    for part in nested or [rope]:
        kind = str(part.get("rope_type") or part.get("type") or "default")
        factor = part.get("factor")
        if kind not in _UNSCALED_ROPE and isinstance(factor, int | float):
            yield factor


def is_allowed_longer(environ: Mapping[str, str]) -> bool:
    """Whether vLLM takes a longer max_model_len with these variables."""
    return environ.get(ALLOW_LONG, "").strip().lower() in ("1", "true")
