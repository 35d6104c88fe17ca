"""What is fetched of a folder in which an adapter lies: its own files, chosen from the listing.

A folder of a training run has more than the adapter: states of optimizers and checkpoints, which
can be ten thousand times as large. What is no adapter is refused before anything is fetched.
"""

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from lmi_vllm.checks.adapter_config import (
    CONFIG,
    LONGEST_CONFIG_BYTES,
    PICKLED_WEIGHTS,
    WEIGHTS,
)
from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.archives import is_archive

_CODE_FILE: Final = "model.py"
# Beside the weights: what a chat template of the adapter's own is read from, and what checks read.
CHAT_FILES: Final = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_LARGEST_CHAT_BYTES: Final = 1 << 20  # of such a file, and of a file that the adapter's code reads
_SHOWN: Final = 3


def adapter_files(sizes: Mapping[str, int], source: str) -> Collection[str]:
    """Return the names of an adapter's files among all that lie below `source`.

    An archive that is alone is returned as it is.

    Raises:
        DownloadError: there is no adapter, or there are several.
    """
    if len(sizes) == 1 and is_archive(next(iter(sizes))):
        return tuple(sizes)
    folder = adapter_folder(sizes, source)
    config = f"{folder}{CONFIG}"
    if sizes[config] > LONGEST_CONFIG_BYTES:
        raise DownloadError(
            f"{source}: {config} has {sizes[config]} bytes: too many for a {CONFIG}"
        )
    weights = next((folder + n for n in (WEIGHTS, *PICKLED_WEIGHTS) if folder + n in sizes), None)
    if weights is None:
        raise DownloadError(f"{source} has no {folder}{WEIGHTS}: its weights are missing")
    has_code = f"{folder}{_CODE_FILE}" in sizes
    more = [
        name
        for name, size in sizes.items()
        if name.startswith(folder) and _is_taken(name.removeprefix(folder), size, has_code)
    ]
    return (config, weights, *(name for name in more if name not in (config, weights)))


def adapter_folder(names: Collection[str], source: str) -> str:
    """Return the folder of the adapter nearest to the root, "" or with a final slash.

    Below it lie a training run's checkpoints.

    Raises:
        DownloadError: there is none, or there are several as near.
    """
    if CONFIG in names:
        return ""
    found = sorted(name.removesuffix(CONFIG) for name in names if name.endswith(f"/{CONFIG}"))
    if not found:
        raise DownloadError(f"{source} has no {CONFIG}: it is not a LoRA adapter")
    nearest = min(name.count("/") for name in found)
    found = [name for name in found if name.count("/") == nearest]
    if len(found) > 1:
        more = f" and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)
        raise DownloadError(
            f"{source} has no {CONFIG} itself and several adapters below it: "
            f"{', '.join(found[:_SHOWN])}{more}; {_advice(source)}"
        )
    return found[0]


def _advice(source: str) -> str:
    if is_archive(source):
        return "pack one of them alone"
    is_below_a_place = "://" in source or Path(source).exists()
    return "name one of them" if is_below_a_place else "put one of them in a repository of its own"


def _is_taken(name: str, size: int, has_code: bool) -> bool:
    if name == _CODE_FILE or name in CHAT_FILES:
        return name == _CODE_FILE or size <= _LARGEST_CHAT_BYTES
    path = PurePosixPath(name)
    is_state = path.suffix in (".bin", ".pt", ".pth", ".pkl", ".safetensors")
    return has_code and not is_state and (path.suffix == ".py" or size <= _LARGEST_CHAT_BYTES)
