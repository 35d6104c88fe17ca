"""Which files the weights of a model are read from, by `load_format`. Names in, names out.

Rules as on the page on start (docs/sources.md#hub) and in vLLM 0.32
`DefaultModelLoader._prepare_weights`: one format only, the first of an order that depends on
`load_format`.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.sources.local import is_directory, is_url

_FOREIGN_FOLDERS: Final = ("coreml", "metal", "onnx", "openvino")
# vLLM filter_files_not_needed_for_inference
_TRAINING_FILES: Final = (
    "optimizer.bin", "optimizer.pt", "scaler.pt", "scheduler.pt", "trainer_state.json",
    "training_args.bin",
)  # fmt: skip
_SHARDS: Final = ("safetensors",)
_PLAIN_TORCH: Final = ("safetensors", "bin", "pt")
_PATTERNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "safetensors": "*.safetensors",
        "consolidated": "consolidated*.safetensors",
        "bin": "*.bin",
        "pt": "*.pt",
        "gguf": "*.gguf",
        "tensors": "*.tensors",
    }
)
_ORDERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
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
# Formats whose files may be elsewhere, or have another name: model_loader_extra_config says so.
_NAMED_IN_EXTRA: Final = ("sharded_state", "runai_streamer_sharded")
# `tensorizer_uri` may be elsewhere, and weights are made up for `dummy`.
_NEEDS_NONE: Final = ("tensorizer", "dummy")
_CONFIGS: Final = ("config.json", "params.json")
# A sentence-transformers module (`2_Dense/`) may hold weights of its own beside the model's.
_MODULE_FOLDER: Final = re.compile(r"\d+_\w+")
_SHOWN_NAMES: Final = 5
_MOST_PLACES: Final = 1000  # folders in a model's; where there are more, weights are not looked for


def is_weight_file(name: str) -> bool:
    """Whether `name` looks like model weights of any format."""
    return name.endswith((".safetensors", ".bin", ".pt", ".gguf", ".tensors"))


def is_for_inference(name: str) -> bool:
    """Whether an engine may read the file of this relative name: hidden ones are left out."""
    *folders, base = name.split("/")
    if any(part.startswith(".") for part in (*folders, base)):
        return False
    return base not in _TRAINING_FILES and not (folders and folders[0] in _FOREIGN_FOLDERS)


def weights_among(names: Sequence[str], load_format: str | None) -> list[str]:
    """Return the names of the weights that are read with `load_format`."""
    order = _ORDERS.get(load_format or "auto")
    if order is None:  # a loader that a plugin registered: only it knows what it reads
        return [name for name in names if is_weight_file(name)]
    top = _first_format([name for name in names if "/" not in name], order)
    if not top:
        return _first_format(names, order)
    for module in {name.rpartition("/")[0] for name in names}:
        if _MODULE_FOLDER.fullmatch(module):
            top += _first_format([n for n in names if n.rpartition("/")[0] == module], order)
    return top


def needs_weights(load_format: str | None) -> bool:
    """Whether a model without files of `load_format` cannot be loaded; false if it is not known."""
    found = load_format or "auto"
    return found in _ORDERS and found not in _NEEDS_NONE


def no_weights(label: str, names: Iterable[str], load_format: str | None) -> str:
    """Return the error of a model that holds `names`, none of which are its weights."""
    found, kind = sorted(names), load_format or "auto"
    shown = ", ".join([*found[:_SHOWN_NAMES], *(["..."] if found[_SHOWN_NAMES:] else [])])
    looked_for = ", ".join(_PATTERNS[one] for one in _ORDERS[kind])
    return (
        f"{label} has no weights for load_format={kind} ({looked_for}); it holds "
        f"{shown or 'no files'}. Name a model with such files, or set option.load_format"
    )


def lack_of_weights(model: ModelArtifacts, arguments: EngineArguments) -> str:
    """Return the error of a model whose folder is here and has no weights; empty for any other."""
    values = arguments.values
    local, load_format = values.get("model"), str(values.get("load_format") or "auto").lower()
    if not isinstance(local, str) or not is_directory(local) or not needs_weights(load_format):
        return ""
    has_other_names = load_format in _NAMED_IN_EXTRA and values.get("model_loader_extra_config")
    if has_other_names or values.get("model_weights") or not _is_plain(Path(local), model):
        return ""
    names = _names_in(Path(local))
    if names is None or weights_among([*filter(is_for_inference, names)], load_format):
        return ""
    place = mask_urls(model.reference) if is_url(model.reference) else local
    return no_weights(f"model ({arguments.origin_of('model')}): {place}", names, load_format)


def _is_plain(folder: Path, model: ModelArtifacts) -> bool:
    """Whether the folder is a model: others have an error of their own, or a user's code."""
    places = (folder, model.directory or folder)
    has_code = any((place / "model.py").is_file() for place in places)
    return not has_code and any((folder / name).is_file() for name in _CONFIGS)


def _names_in(folder: Path) -> list[str] | None:
    """Return the files below `folder`, as relative names; None where there are too many to look."""
    walked = list(islice(os.walk(folder, followlinks=True), _MOST_PLACES))
    names = [
        str((Path(place) / name).relative_to(folder))
        for place, _, files in walked
        for name in files
    ]
    return None if len(walked) == _MOST_PLACES else names


def _first_format(names: Sequence[str], order: Sequence[str]) -> list[str]:
    for kind in order:
        weights = [name for name in names if _matches(name.rpartition("/")[2], kind)]
        if weights:
            return weights
    return []


def _matches(base: str, kind: str) -> bool:
    if kind == "safetensors" and base.startswith("consolidated"):
        return False
    return fnmatchcase(base, _PATTERNS[kind])
