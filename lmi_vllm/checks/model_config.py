"""The model's own config.json and the size of its weights, from a directory or over the network.

Only files of a few kilobytes are read; no weight is ever fetched here.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.sources.local import is_directory
from lmi_vllm.sources.table import read_text

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What is known of the model's files; `problem` says why something is not."""

    config: Mapping[str, object] | None = None
    weight_bytes: int | None = None
    problem: str = ""


def read_model_files(
    model: ModelArtifacts, environ: Mapping[str, str], *, is_offline: bool = False
) -> ModelFiles:
    """config.json and the weights' size of `model`; never raises."""
    if is_directory(model.model):
        return read_directory(Path(model.model))
    if is_offline:
        return ModelFiles(problem=f"{mask_urls(model.model)} is not local and --offline was given")
    return _from_texts(lambda name: read_text(model.model, name, environ, model.revision))


def read_directory(directory: Path) -> ModelFiles:
    """The files of a local model."""
    files = _from_texts(
        lambda name: (directory / name).read_text("utf-8") if (directory / name).is_file() else None
    )
    for pattern in _WEIGHT_PATTERNS:
        size = sum(path.stat().st_size for path in directory.glob(pattern))
        if size:
            return ModelFiles(files.config, size, files.problem)
    return files


def _from_texts(read: Callable[[str], str | None]) -> ModelFiles:
    """The files, each read by name; None stands for a file that does not exist."""
    try:
        text = read("config.json")
        if text is None:
            return ModelFiles(problem="the model has no config.json")
        config = json.loads(text)
        if not isinstance(config, dict):
            return ModelFiles(problem="config.json is no JSON object")
        index = read("model.safetensors.index.json")
        return ModelFiles(config, _indexed_size(index))
    except (DownloadError, OSError, ValueError) as error:
        return ModelFiles(problem=f"config.json cannot be read: {mask_urls(str(error))}")


def _indexed_size(index: str | None) -> int | None:
    """The size that a safetensors index states."""
    metadata = json.loads(index).get("metadata", {}) if index else {}
    size = metadata.get("total_size")
    return int(size) if isinstance(size, int | float) else None
