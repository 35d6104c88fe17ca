"""The private copy of an adapter, in formats that the engine can safely read."""

import json
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.adapter_config import (
    CONFIG,
    PICKLED_WEIGHTS,
    WEIGHTS,
    LoraScales,
    engine_config,
    module_of,
    read_config,
    resolve_scales,
)
from lmi_vllm.checks.adapter_names import fitting_names
from lmi_vllm.checks.adapter_weights import check_base_layers, check_parts, check_values
from lmi_vllm.checks.base_model import BaseModel
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors, rename_tensors
from lmi_vllm.engine.vllm.parts import ConvertPickle
from lmi_vllm.engine.vllm.workarounds import is_needed
from lmi_vllm.errors import AdapterRefusedError

NO_RANKS: Final[Mapping[str, int]] = MappingProxyType({})
NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
_CHUNK_BYTES: Final = 1 << 20
_TRAINED: Final = "as_trained.safetensors"  # the weights with the names of their training


def copy_adapter(  # noqa: PLR0913, PLR0917 - one name for each bound
    source: Path,
    target: Path,
    base: BaseModel,
    most_bytes: int,
    convert_pickle: ConvertPickle,
    roots: Sequence[Path] = (),
    names: Mapping[str, str] = NO_NAMES,
) -> None:
    """Copy the files of an adapter that the engine reads, and make the copy safe.

    The copy is checked, because the source may have changed since the registration. In the copy,
    module names replace regular expressions, and safetensors replace a pickle. Other files of the
    folder are not copied, whatever their number and size. `base` is the served model, `most_bytes`
    the size of all files. If `source` is below one of `roots`, its files are. In the copy weights
    have the names that `names` has for them.

    Raises:
        NotADirectoryError: there is no such folder.
        OSError: a file cannot be copied.
        AdapterRefusedError: it would harm other requests, or is not an adapter.
    """
    if not source.is_dir():
        raise NotADirectoryError(str(source))
    target.mkdir(parents=True, exist_ok=True)
    real_roots = [root.resolve() for root in roots]
    if not any(source.is_relative_to(root) for root in real_roots):
        real_roots = []  # of the model, or fetched
    for name in (CONFIG, WEIGHTS, *PICKLED_WEIGHTS):
        if (source / name).is_file():
            most_bytes -= _copy_file(source / name, target / name, most_bytes, real_roots)
    try:
        _without_pickles(target, str(source), convert_pickle)
        _make_harmless(target, str(source), base, names)
    except (DamagedFileError, ValueError, RecursionError) as error:
        raise AdapterRefusedError(f"{source} is damaged: {error}") from error


def _copy_file(source: Path, target: Path, most_bytes: int, roots: Sequence[Path] = ()) -> int:
    """Copy a file, even if it is replaced or extended meanwhile; return its size."""
    size = 0
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe has no writer
    with os.fdopen(descriptor, "rb") as file, target.open("wb") as copy:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise AdapterRefusedError(f"{source} is no regular file")
        real = Path(f"/proc/self/fd/{file.fileno()}").resolve() if roots else source
        if roots and not any(real.is_relative_to(root) for root in roots):
            raise AdapterRefusedError(f"{source} leads out of the folders of LMI_ADAPTER_ROOTS")
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > most_bytes:
                raise AdapterRefusedError(
                    f"{source.parent} is larger than LMI_ADAPTER_MAX_SIZE allows"
                )
            copy.write(chunk)
    return size


def renamed_weights(folder: Path, base: BaseModel) -> Mapping[str, str]:
    """Return other names for an adapter's weights, by which all fit; empty if there are none.

    Raises:
        OSError: they cannot be read.
        DamagedFileError: they are damaged.
    """
    return fitting_names(read_tensors(folder / WEIGHTS), base.shapes)


def _make_harmless(copy: Path, shown: str, base: BaseModel, names: Mapping[str, str]) -> None:
    config = read_config(copy / CONFIG, shown)
    tensors = read_tensors(copy / WEIGHTS)
    scales = resolve_scales(config, {module_of(name)[0] for name in tensors}, shown)
    if names:
        (copy / WEIGHTS).rename(copy / _TRAINED)
        rename_tensors(copy / _TRAINED, copy / WEIGHTS, names)
        (copy / _TRAINED).unlink()
        scales = scales.renamed({module_of(a)[0]: module_of(b)[0] for a, b in names.items()})
        tensors = read_tensors(copy / WEIGHTS)
    modules = {module_of(name)[0] for name in tensors}
    check_parts(tensors, scales, shown)
    check_values(copy / WEIGHTS, tensors, scales, shown, base.limit)
    check_base_layers(copy / WEIGHTS, tensors, base.stored, shown)
    if is_needed("own_scales"):
        _check_common_scale(scales, modules, shown)
    (copy / CONFIG).write_text(json.dumps(engine_config(config, scales, modules, shown)))


def _check_common_scale(scales: LoraScales, modules: Collection[str], shown: str) -> None:
    """Refuse what vLLM 0.31 would compute with one scale for all modules."""
    common = replace(scales, ranks=NO_RANKS, alphas=NO_RANKS)
    if any(scales.of(module) != common.of(module) for module in modules):
        raise AdapterRefusedError(
            f"{shown}: rank_pattern or alpha_pattern gives modules a scale of their own, which "
            f"this vLLM does not read: use vLLM 0.32 or later, or an adapter without them"
        )


def _without_pickles(copy: Path, shown: str, convert: ConvertPickle) -> None:
    """Turn pickles of tensors into safetensors, unless there are some: vLLM prefers those."""
    weights = copy / WEIGHTS
    for name in PICKLED_WEIGHTS:
        pickle = copy / name
        if not pickle.is_file():
            continue
        if not weights.is_file() and (reason := convert(pickle, weights)):
            raise AdapterRefusedError(f"{shown}: {name} {reason}")
        pickle.unlink()
