"""The model's own config.json and the size of its weights, from a directory or over the network.

Only files of a few kilobytes are read; no weight is ever fetched here.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import DownloadError
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.sources.archives import is_archive
from lmi_vllm.sources.base import NothingThereError
from lmi_vllm.sources.local import is_directory
from lmi_vllm.sources.table import Sources

logger = logging.getLogger(__name__)

_INDEX: Final = "model.safetensors.index.json"
_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")
# For all reads of one model: an unreachable hub must not delay `explain` or a start.
READ_SECONDS: Final = 8.0
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model's files that could be read; `problem` says why one could not.

    With `is_missing` there is no model, and a start would end with the problem.
    """

    config: Mapping[str, object] | None = None
    weight_bytes: int | None = None
    problem: str = ""
    is_missing: bool = False

    @property
    def unread_warning(self) -> str:
        """The warning that checks were skipped, for files with a problem."""
        return f"the settings were not checked against the model: {self.problem}"


def read_local_files(model: ModelArtifacts) -> ModelFiles:
    """The files of a model in a local directory; empty for any other model."""
    return read_directory(Path(model.model)) if is_directory(model.model) else ModelFiles()


def read_model_files(
    model: ModelArtifacts, environ: Mapping[str, str], sources: Sources, *, with_size: bool = False
) -> ModelFiles:
    """config.json of `model` (and the weights' size), over the network too; never raises.

    An answer that takes longer than `READ_SECONDS` is not waited for.
    """
    if is_directory(model.model):
        return read_directory(Path(model.model))
    if is_archive(model.model):
        return ModelFiles()  # not examined until it is here

    if problem := sources.unreadable(model.model, environ):
        return ModelFiles(problem=problem, is_missing=True)

    def text_of(name: str) -> str | None:
        text = sources.read_text(model.model, name, environ, model.revision)
        if text is None and name == "config.json":
            sources.require_objects(model.model, environ)
        return text

    source = mask_urls(model.model)
    late = ModelFiles(problem=f"config.json of {source} did not come within {READ_SECONDS:g} s")
    return in_time(lambda: _from_texts(text_of, with_size=with_size), late)


def in_time(read: Callable[[], _Read], late: _Read) -> _Read:
    """What `read` returns; `late` if it takes longer than `READ_SECONDS`."""
    found: list[_Read] = []
    # A thread of its own, because a look-up of a name cannot be interrupted. A daemon does not
    # delay the exit.
    reading = threading.Thread(target=lambda: found.append(read()), daemon=True)
    reading.start()
    reading.join(READ_SECONDS)
    return found[0] if found else late


def read_directory(directory: Path) -> ModelFiles:
    """The files of a local model."""
    files = _from_texts(
        lambda name: (directory / name).read_text("utf-8") if (directory / name).is_file() else None
    )
    named = _indexed_files(directory)
    for pattern in _WEIGHT_PATTERNS:
        found = list(directory.glob(pattern))
        plain = [path for path in found if path.name in named] or [
            path for path in found if not path.name.startswith("consolidated")
        ]
        read = plain or found  # Mistral's layout has them, too
        # `weight_problems` names a link to nothing.
        size = sum(path.stat().st_size for path in read if path.exists())
        if size:
            return ModelFiles(files.config, size, files.problem)
    return files


def _from_texts(read: Callable[[str], str | None], *, with_size: bool = True) -> ModelFiles:
    """The files, each read by name; None stands for a missing file."""
    try:
        text = read("config.json")
        if text is None:
            return ModelFiles(problem="the model has no config.json")
        config = json.loads(text)
        if not isinstance(config, dict):
            return ModelFiles(problem="config.json is no JSON object")
    except NothingThereError as error:
        return ModelFiles(problem=mask_urls(error.text), is_missing=True)
    except (DownloadError, OSError, ValueError) as error:
        return ModelFiles(problem=f"config.json cannot be read: {mask_urls(str(error))}")
    return ModelFiles(config, _indexed_size(read) if with_size else None)


def _indexed_size(read: Callable[[str], str | None]) -> int | None:
    """The size that a safetensors index states; None without one, or where it cannot be read."""
    try:
        size = json.loads(read(_INDEX) or "{}")["metadata"]["total_size"]
    except (DownloadError, OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("no size of the weights in %s: %s", _INDEX, mask_urls(str(error)))
        return None
    return int(size) if isinstance(size, int | float) else None


def _indexed_files(directory: Path) -> frozenset[str]:
    """The files that the index of a local model names: vLLM reads no other; empty without one."""
    try:
        return frozenset(json.loads((directory / _INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset()


def tensor_names(directory: Path) -> frozenset[str]:
    """The names of the weights in a local model's safetensors; empty where they are not known."""
    try:
        index = directory / _INDEX
        if index.is_file():
            return frozenset(json.loads(index.read_text("utf-8"))["weight_map"])
        files = list(directory.glob("*.safetensors"))
        return frozenset(name for file in files for name in read_tensors(file))
    except (DamagedFileError, OSError, ValueError, KeyError, TypeError) as error:
        logger.debug("no names of weights in %s: %s", directory, error)
        return frozenset()
