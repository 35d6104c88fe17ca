"""The private copy of an adapter, in formats that the engine can safely read."""

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lmi_vllm.checks.adapter_config import (
    CONFIG,
    PICKLED_WEIGHTS,
    WEIGHTS,
    engine_config,
    module_of,
    read_config,
    resolve_scales,
)
from lmi_vllm.checks.adapter_weights import Limit, check_values
from lmi_vllm.checks.safetensors_header import DamagedFileError, read_tensors
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.extension import extension

_CHUNK_BYTES: Final = 1 << 20


def copy_adapter(
    source: Path, target: Path, limit: Limit, most_bytes: int, roots: Sequence[Path] = ()
) -> None:
    """Copy the files of an adapter that the engine reads, and make the copy safe.

    The copy is checked, because the source may have changed since the registration. In the copy,
    module names replace regular expressions, and safetensors replace a pickle. Other files of the
    folder are not copied, whatever their number and size. `limit` is the largest product for each
    module, `most_bytes` the size of all files. If `source` is below one of `roots`, its files are.

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
        _make_harmless(target, str(source), limit)
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


def _make_harmless(copy: Path, shown: str, limit: Limit) -> None:
    for name in PICKLED_WEIGHTS:
        if (copy / name).is_file():
            _without_pickle(copy / name, copy / WEIGHTS, f"{shown}: {name}")
    config = read_config(copy / CONFIG, shown)
    tensors = read_tensors(copy / WEIGHTS)
    modules = {module_of(name)[0] for name in tensors}
    scales = resolve_scales(config, modules, shown)
    check_values(copy / WEIGHTS, tensors, scales, shown, limit)
    (copy / CONFIG).write_text(json.dumps(engine_config(config, scales, modules, shown)))


def _without_pickle(pickle: Path, weights: Path, shown: str) -> None:
    """Turn a pickle of tensors into safetensors, unless there are some: vLLM prefers those."""
    if not weights.is_file():
        convert = extension(lambda extra: extra.pickled_weights)
        if reason := convert(pickle, weights):
            raise AdapterRefusedError(f"{shown} {reason}")
    pickle.unlink()
