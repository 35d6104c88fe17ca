"""Which files of a hub repository vLLM will read. Pure: names in, names out.

Rules as on the page on start (docs/sources.md#hub) and in vLLM 0.32
`DefaultModelLoader._prepare_weights`: one weight format only, the first of an order that depends on
`load_format`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from lmi_vllm.features.transfer import is_weight_file

DEFAULT_IGNORE_PATTERNS: Final = ("original/**/*", "original/*")

# Configuration, tokenizer, chat template, processor and custom code.
_SUPPORT_SUFFIXES: Final = (
    ".json", ".jinja", ".model", ".py", ".spm", ".tiktoken", ".txt", ".vocab", ".yaml", ".yml",
)  # fmt: skip
# Mistral's own tokenizer before Tekken: tokenizer.model.v3
_VERSIONED: Final = re.compile(r"(.*/)?tokenizer\.model\.v\d+\w*")
_FOREIGN_FOLDERS: Final = ("coreml", "metal", "onnx", "openvino")
# vLLM filter_files_not_needed_for_inference
_TRAINING_FILES: Final = (
    "optimizer.bin", "optimizer.pt", "scaler.pt", "scheduler.pt", "trainer_state.json",
    "training_args.bin",
)  # fmt: skip
_SHARDS: Final = ("safetensors",)
_PLAIN_TORCH: Final = ("safetensors", "bin", "pt")
_WEIGHT_PATTERNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "safetensors": "*.safetensors",
        "consolidated": "consolidated*.safetensors",
        "bin": "*.bin",
        "pt": "*.pt",
        "gguf": "*.gguf",
        "tensors": "*.tensors",
    }
)
_FORMAT_ORDERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "auto": ("safetensors", "bin", "consolidated", "pt"),
        "hf": _PLAIN_TORCH,
        "bitsandbytes": _PLAIN_TORCH,
        "safetensors": ("safetensors", "consolidated"),
        "fastsafetensors": ("safetensors", "consolidated"),
        "instanttensor": ("safetensors", "consolidated"),
        "sharded_state": _SHARDS,
        "runai_streamer": _SHARDS,
        "runai_streamer_sharded": _SHARDS,
        "mistral": ("consolidated",),
        "pt": ("pt",),
        "npcache": ("bin",),
        "gguf": ("gguf",),
        "tensorizer": ("tensors",),
        "dummy": (),
    }
)
# A sentence-transformers module (`2_Dense/`) may hold weights of its own beside the model's.
_MODULE_FOLDER: Final = re.compile(r"\d+_\w+")


@dataclass(frozen=True, slots=True)
class FileSelection:
    """The files to fetch, and which of them are weights."""

    files: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        """Whether there is anything for the engine to load."""
        return bool(self.weights)


def select_files(
    names: Iterable[str], load_format: str | None, ignore_patterns: Sequence[str] | None
) -> FileSelection:
    """The files of a repository that vLLM reads with `load_format`.

    `ignore_patterns` replaces the default one, which leaves out `original/`.
    """
    ignored = DEFAULT_IGNORE_PATTERNS if ignore_patterns is None else tuple(ignore_patterns)
    kept = [name for name in names if _is_wanted(name, ignored)]
    weights = _select_weights(kept, load_format or "auto")
    support = [name for name in kept if _is_support(name)]
    is_consolidated = any(_folder_and_base(name)[1].startswith("consolidated") for name in weights)
    if not is_consolidated and "config.json" in support:
        # With Mistral's own params.json beside it, vLLM would look for the consolidated weights.
        support = [name for name in support if name != "params.json"]
    files = sorted({*support, *weights})
    return FileSelection(tuple(files), tuple(sorted(weights)))


def _is_support(name: str) -> bool:
    return name.endswith(_SUPPORT_SUFFIXES) or _VERSIONED.fullmatch(name) is not None


def needs_weights(load_format: str | None) -> bool:
    """Whether `load_format` reads weight files at all."""
    return load_format != "dummy"


def _is_wanted(name: str, ignored: Sequence[str]) -> bool:
    folder, base = _folder_and_base(name)
    parts = folder.split("/") if folder else []
    if any(part.startswith(".") for part in (*parts, base)):
        return False
    if base in _TRAINING_FILES or (parts and parts[0] in _FOREIGN_FOLDERS):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in ignored)


def _select_weights(names: Sequence[str], load_format: str) -> list[str]:
    order = _FORMAT_ORDERS.get(load_format)
    if order is None:  # a loader that a plugin registered: only it knows what it reads
        return [name for name in names if is_weight_file(name)]
    top = _first_format([name for name in names if "/" not in name], order)
    if not top:
        return _first_format(names, order)
    modules = {folder for folder in _folders(names) if _MODULE_FOLDER.fullmatch(folder)}
    for module in modules:
        top += _first_format([n for n in names if _folder_and_base(n)[0] == module], order)
    return top


def _first_format(names: Sequence[str], order: Sequence[str]) -> list[str]:
    for kind in order:
        weights = [name for name in names if _matches(_folder_and_base(name)[1], kind)]
        if weights:
            return weights
    return []


def _matches(base: str, kind: str) -> bool:
    if kind == "safetensors" and base.startswith("consolidated"):
        return False
    return fnmatchcase(base, _WEIGHT_PATTERNS[kind])


def _folders(names: Iterable[str]) -> set[str]:
    return {_folder_and_base(name)[0] for name in names}


def _folder_and_base(name: str) -> tuple[str, str]:
    folder, _, base = name.rpartition("/")
    return folder, base
