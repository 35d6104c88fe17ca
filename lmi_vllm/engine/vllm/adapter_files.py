"""The private copy of an adapter, made one that the engine may read."""

import json
import shutil
from pathlib import Path
from typing import Final

from lmi_vllm.checks.adapter_config import engine_config, module_of, read_config, resolve_scales
from lmi_vllm.checks.adapter_weights import any_base, check_values
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.errors import AdapterRefusedError

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLES: Final = ("adapter_model.bin", "adapter_model.pt")


def copy_adapter(source: Path, target: Path) -> None:
    """Copy what the engine reads of an adapter folder, and make the copy one that it may read.

    The copy is what is checked: the source may have changed since it was registered. In it, module
    names stand where the source has regular expressions, and safetensors where it has a pickle.
    Whatever else is in the folder, as many and as large files as may be, stays where it is.

    Raises:
        NotADirectoryError: there is no such folder.
        OSError: a file cannot be copied.
        AdapterRefusedError: it would harm other requests, or is none.
    """
    if not source.is_dir():
        raise NotADirectoryError(str(source))
    target.mkdir(parents=True, exist_ok=True)
    for name in (_CONFIG, _WEIGHTS, *_PICKLES):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    try:
        _make_harmless(target, str(source))
    except (DamagedFileError, ValueError, RecursionError) as error:
        raise AdapterRefusedError(f"{source} is damaged: {error}") from error


def _make_harmless(copy: Path, shown: str) -> None:
    for name in _PICKLES:
        if (copy / name).is_file():
            _without_pickle(copy, name, shown)
    config = read_config(copy / _CONFIG, shown)
    tensors = read_tensors(copy / _WEIGHTS)
    modules = {module_of(name)[0] for name in tensors}
    scales = resolve_scales(config, modules, shown)
    check_values(copy / _WEIGHTS, tensors, scales, shown, any_base)
    (copy / _CONFIG).write_text(json.dumps(engine_config(config, scales, modules, shown)))


def _without_pickle(copy: Path, name: str, shown: str) -> None:
    """Turn a pickle of tensors into safetensors, unless those are there: vLLM prefers them."""
    import torch  # noqa: PLC0415 (only where a pickle comes)
    from safetensors.torch import save_file  # noqa: PLC0415

    pickle = copy / name
    if not (copy / _WEIGHTS).is_file():
        try:
            tensors = torch.load(pickle, map_location="cpu", weights_only=True)
            # Tensors may share memory in a pickle, not in safetensors.
            own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
            save_file(own, copy / _WEIGHTS)
        except Exception as error:  # a stranger's pickle
            raise AdapterRefusedError(f"{shown}: {name} cannot be read: {error}") from error
    pickle.unlink()
