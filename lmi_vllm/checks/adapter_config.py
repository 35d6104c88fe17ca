"""Reads adapter_config.json: ranks and scales, with its regular expressions resolved.

`rank_pattern` and `alpha_pattern` are regular expressions that vLLM matches in the engine's own
thread, where `(.|.)*[!?]` never returns. So a child process with a time limit matches them here,
and the engine gets the module names. Fields that only training reads are left out.
"""

import json
import math
import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lmi_vllm.checks import pattern_child
from lmi_vllm.errors import AdapterRefusedError

# The files of an adapter that are read.
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PICKLED_WEIGHTS: Final = ("adapter_model.bin", "adapter_model.pt")
PREFIX: Final = "base_model.model."
EMBEDDING: Final = "lora_embedding_"  # prefixes of the parts of an embedding
MAX_ALPHA: Final = 1e6
RANKS: Final = "rank_pattern"
ALPHAS: Final = "alpha_pattern"
# Fields that name the trained modules. The tensors' names say the same, and only those count.
_TRAINING_ONLY: Final = ("exclude_modules", "layers_pattern", "layers_to_transform")
_LITERAL: Final = re.compile(r"[A-Za-z0-9_.\-]+")
_SHOWN_CHARACTERS: Final = 80
_CHILD_SECONDS: Final = 20.0  # seconds, on a busy machine; its own limit is processor time
_LITERAL_KEYS: Final = 64  # so few keys are cheap for the engine to try for each module
# Names in the engine's one expression: compiling it takes 0.5 s at most.
_NAMES_CHARACTERS: Final = 256 << 10
LONGEST_CONFIG_BYTES: Final = 2 << 20


def read_config(path: Path, shown: str) -> dict[str, Any]:
    """Return the adapter's configuration.

    Raises:
        AdapterRefusedError: it is not a JSON object, or too large to be parsed in the event loop.
        OSError: it cannot be read.
    """
    if path.stat().st_size > LONGEST_CONFIG_BYTES:
        raise AdapterRefusedError(
            f"{shown}: {path.name} is larger than {LONGEST_CONFIG_BYTES >> 20} MiB"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AdapterRefusedError(f"{shown}: {path.name} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRefusedError(f"{shown}: {path.name} is not a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class LoraScales:
    """The scaling factor of an adapter's products, with the exceptions by module name."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Return the rank of one module, by which its scale is computed."""
        return self.ranks.get(_matched_name(module), self.rank)

    def renamed(self, modules: Mapping[str, str]) -> "LoraScales":
        """Return the factors of the same modules under other names."""
        ranks = {modules.get(name, name): rank for name, rank in self.ranks.items()}
        alphas = {modules.get(name, name): alpha for name, alpha in self.alphas.items()}
        return replace(self, ranks=ranks, alphas=alphas)

    def of(self, module: str) -> float:
        """Return the factor of one module, as PEFT and vLLM compute it."""
        rank, alpha = self.rank_of(module), self.alphas.get(_matched_name(module), self.alpha)
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def module_of(tensor: str) -> tuple[str, str]:
    """Return the module and the part (lora_A, lora_B ...) in a tensor's name, as vLLM reads it."""
    name = tensor.replace(PREFIX, "") if tensor.startswith(PREFIX) else tensor
    module, _, part = name.removesuffix(".weight").rpartition(".")
    return module, part.replace(EMBEDDING, "lora_")


def resolve_scales(config: Mapping[str, Any], modules: Collection[str], shown: str) -> LoraScales:
    """Return the factors of each of `modules`, in bounded time for any patterns.

    Raises:
        AdapterRefusedError: a pattern is invalid or takes too long, or a scale is not a number.
    """
    rank, alpha = config.get("r"), config.get("lora_alpha")
    names = sorted(map(_matched_name, modules))
    ranks = _resolved(config, RANKS, names, shown)
    alphas = _resolved(config, ALPHAS, names, shown)
    for value in (rank, *(config.get(RANKS) or {}).values()):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise AdapterRefusedError(f"{shown}: the rank must be positive, it is {value!r:.80}")
    for value in (alpha, *(config.get(ALPHAS) or {}).values()):
        _check_alpha(value, shown)
    return LoraScales(
        rank=int(rank or 1),
        alpha=float(alpha or 0),
        is_rank_stabilised=bool(config.get("use_rslora")),
        ranks=ranks,
        alphas={name: float(value) for name, value in alphas.items()},
    )


def engine_config(
    config: Mapping[str, Any], scales: LoraScales, modules: Collection[str], shown: str
) -> dict[str, Any]:
    """Return the configuration for the engine: names in place of regular expressions.

    Raises:
        AdapterRefusedError: too many modules have a rank or scale of their own.
    """
    kept = {name: value for name, value in config.items() if name not in _TRAINING_ONLY}
    return kept | {
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        RANKS: _by_name(config.get(RANKS), scales.ranks, shown),
        ALPHAS: _by_name(config.get(ALPHAS), scales.alphas, shown),
    }


def _matched_name(module: str) -> str:
    """Return the name that patterns are compared with: PEFT renames fused experts."""
    if module.endswith(".experts.base_layer"):
        return module.removesuffix(".base_layer") + ".gate_up_proj"
    return module + ".down_proj" * module.endswith(".experts")


def _check_alpha(value: object, shown: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:  # type: ignore[operator]
        text = repr(value)[:_SHOWN_CHARACTERS]
        raise AdapterRefusedError(
            f"{shown}: lora_alpha must be a number of at most {MAX_ALPHA:g}, it is {text}"
        )


def _resolved(
    config: Mapping[str, Any], field: str, names: Sequence[str], shown: str
) -> dict[str, Any]:
    """Return name -> value for the names that a pattern of the field matches; the first wins."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterRefusedError(f"{shown}: {field} is not an object")
    if not patterns:
        return {}
    keys, values = list(patterns), list(patterns.values())
    matches = _literal(keys, names) if _is_literal(keys) else _matched(keys, names, field, shown)
    return {name: values[at] for name, at in zip(names, matches, strict=True) if at is not None}


def _is_literal(keys: Collection[str]) -> bool:
    return all(_LITERAL.fullmatch(key) for key in keys)


def _literal(keys: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """Return for each name the first key that equals it, or that it ends with after a dot."""
    position = {key: at for at, key in reversed(list(enumerate(keys)))}
    return [
        min((position[e] for e in _ends(name) if e in position), default=None) for name in names
    ]


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[at:]) for at in range(len(parts))]


def _matched(keys: list[str], names: Sequence[str], field: str, shown: str) -> list[int | None]:
    """Return for each name the first expression that matches it, found by a child process."""
    command = [sys.executable, "-I", pattern_child.__file__]
    question = json.dumps({"patterns": keys, "names": names})
    try:
        child = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=_CHILD_SECONDS,
            check=True,
        )  # fmt: skip
        answer = json.loads(child.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise AdapterRefusedError(
            f"{shown}: the regular expressions of {field} take longer than "
            f"{pattern_child.CPU_SECONDS} s, or too much memory, on the adapter's modules"
        ) from error
    if "wrong" in answer:
        key = keys[answer["wrong"]][:_SHOWN_CHARACTERS]
        raise AdapterRefusedError(
            f"{shown}: {key!r} in {field} is not a regular expression: {answer['error']}"
        )
    found: list[int | None] = answer["found"]
    return found


def _by_name(patterns: Any, values: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """Return vLLM's pattern -> value, in which every pattern is a list of names."""
    if patterns and len(patterns) <= _LITERAL_KEYS and _is_literal(patterns):
        return {re.escape(key): value for key, value in patterns.items()}
    grouped: dict[Any, list[str]] = {}
    for name, value in values.items():
        grouped.setdefault(value, []).append(re.escape(name))
    if sum(map(len, values)) > _NAMES_CHARACTERS:
        raise AdapterRefusedError(
            f"{shown}: {len(values)} modules have a rank or alpha of their own by pattern, which "
            "would stall the engine; name them by few names without regular expressions"
        )
    # Anchored at the name's beginning: a name may be the end of another.
    return {f"^(?:{'|'.join(names)})": value for value, names in grouped.items()}
