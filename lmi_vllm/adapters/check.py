"""Checks that a folder is a LoRA adapter for the served model, without torch or vLLM.

Problems that the files show are errors here, so that the engine's loader gets valid adapters only.
Others are left to the engine, which refuses the adapter without harm (engine/vllm/adapters.py): a
base model that is not local, quantised, or of an unknown layout.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lmi_vllm.checks.adapter_config import (
    CONFIG,
    EMBEDDING,
    PICKLED_WEIGHTS,
    WEIGHTS,
    module_of,
    read_config,
    resolve_scales,
)
from lmi_vllm.checks.adapter_weights import check_base_layers, check_parts, check_values
from lmi_vllm.checks.base_model import BaseModel
from lmi_vllm.checks.safetensors_header import DamagedFileError, Shape, Tensor, read_tensors
from lmi_vllm.errors import AdapterMissingError, AdapterRefusedError

logger = logging.getLogger(__name__)

_SHOWN_MODULES: Final = 3
_MATRIX: Final = 2
# Switches of PEFT that vLLM 0.32 does not implement (vllm/lora/peft_helper.py).
_UNSUPPORTED: Final = (
    "use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora",
    "use_qalora",
)  # fmt: skip


def check_adapter(folder: Path, shown: str, base: BaseModel) -> None:
    """Check the adapter in `folder`; `shown` is its name in errors.

    Raises:
        AdapterRefusedError: what is wrong with it.
    """
    check_folder(folder, shown)
    try:
        config = _read_config(folder / CONFIG, shown)
        _check_config(config, shown, base)
        tensors = _read_weights(folder, shown)
        if tensors is not None:
            # The engine knows how many rows its embedding takes, padded or extended.
            shapes = {name: one.shape for name, one in tensors.items() if EMBEDDING not in name}
            _check_weights(shapes, shown, base)
            modules = {module_of(name)[0] for name in tensors}
            scales = resolve_scales(config, modules, shown)
            check_parts(tensors, scales, shown)
            check_values(folder / WEIGHTS, tensors, scales, shown, base.limit)
            unknown = check_base_layers(folder / WEIGHTS, tensors, base.stored, shown)
            if unknown:
                logger.warning(
                    "%s holds the base's weight of %s, which is not in the files of the model "
                    "served (quantized, or not on this machine): whether it is of another model "
                    "cannot be seen",
                    shown,
                    ", ".join(unknown[:_SHOWN_MODULES]),
                )
    except OSError as error:
        raise AdapterRefusedError(f"{shown} cannot be read: {error.strerror}") from error


def check_folder(folder: Path, shown: str) -> None:
    """Check that there is a folder.

    Raises:
        AdapterMissingError: there is none, or a file.
    """
    if not folder.is_dir():
        raise AdapterMissingError(
            f"Only local LoRA models are supported. {shown} is not a valid path"
        )


def _read_config(path: Path, shown: str) -> dict[str, Any]:
    if not path.is_file():
        raise AdapterRefusedError(f"{shown} has no {CONFIG}: it is not a LoRA adapter")
    return read_config(path, shown)


def _check_config(config: Mapping[str, Any], shown: str, base: BaseModel) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterRefusedError(f"{shown}: peft_type is {kind!s:.80}, only LORA can be served")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise AdapterRefusedError(f"{shown}: vLLM does not support {name}")
    if config.get("bias", "none") != "none":
        raise AdapterRefusedError(f"{shown}: vLLM does not support adapters with bias")
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise AdapterRefusedError(f"{shown}: rank_pattern is not an object")
    for rank in (config.get("r"), *patterns.values()):
        _check_rank(rank, shown, base)
    named = config.get("base_model_name_or_path")
    if named and base.names and named not in base.names:
        logger.info("%s was trained on %.200s; the model served is %s", shown, named, base.names[0])


def _check_rank(rank: object, shown: str, base: BaseModel) -> None:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterRefusedError(
            f"{shown}: the rank r must be a whole number above 0, it is {rank!r:.80}"
        )
    if rank > base.max_lora_rank:
        raise AdapterRefusedError(
            f"{shown}: LoRA rank {rank!r:.80} is greater than max_lora_rank {base.max_lora_rank}; "
            "option.max_lora_rank can be up to 512"
        )


def _read_weights(folder: Path, shown: str) -> dict[str, Tensor] | None:
    """Return the tensors of the weights; None for a pickle, which only the engine opens."""
    if not (folder / WEIGHTS).is_file():
        if any((folder / name).is_file() for name in PICKLED_WEIGHTS):
            return None
        raise AdapterRefusedError(f"{shown} has no {WEIGHTS}: its weights are missing")
    try:
        tensors = read_tensors(folder / WEIGHTS)
    except DamagedFileError as error:
        raise AdapterRefusedError(f"{shown}: {WEIGHTS} is damaged: {error}") from error
    if not tensors:
        raise AdapterRefusedError(f"{shown}: {WEIGHTS} holds no weights")
    return tensors


def _check_weights(shapes: Mapping[str, Shape], shown: str, base: BaseModel) -> None:
    pairs: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        module, part = module_of(name)
        if part in ("lora_A", "lora_B"):
            pairs.setdefault(module, {})[part] = shape
    for module, pair in pairs.items():
        if len(pair) != 2:  # noqa: PLR2004 (A and B)
            raise AdapterRefusedError(f"{shown}: {module} has {next(iter(pair))} only")
        if all(len(shape) == _MATRIX and 0 not in shape for shape in pair.values()):
            _check_pair(module, pair, shown, base)
    if base.shapes and (unknown := _unknown(list(pairs), base)):
        more = f" and {len(unknown) - _SHOWN_MODULES} more" * (len(unknown) > _SHOWN_MODULES)
        raise AdapterRefusedError(
            f"{shown}: the base model has no {', '.join(unknown[:_SHOWN_MODULES])}{more}"
        )


def _unknown(modules: list[str], base: BaseModel) -> list[str]:
    """Return the modules that the base does not have.

    Multi-modal models are stored under other prefixes. So if no module has its full name there,
    only the last parts of the names are compared. Experts and tied heads are stored under other
    names.
    """
    compared = [name for name in modules if ".experts" not in name and "lm_head" not in name]
    if any(name in base.shapes for name in compared):
        return [name for name in compared if name not in base.shapes]
    ends = {name.rpartition(".")[2] for name in base.shapes}
    return [name for name in compared if name.rpartition(".")[2] not in ends]


def _check_pair(module: str, pair: Mapping[str, Shape], shown: str, base: BaseModel) -> None:
    (rank, columns), (rows, rank_b) = pair["lora_A"], pair["lora_B"]
    if rank != rank_b:
        raise AdapterRefusedError(
            f"{shown}: {module} has rank {rank} in lora_A and {rank_b} in lora_B"
        )
    _check_rank(rank, f"{shown}: {module}", base)
    wanted = base.shapes.get(module) if base.shapes else None
    # GPT-2 and similar models store some layers transposed.
    if wanted is not None and wanted not in ((rows, columns), (columns, rows)):
        raise AdapterRefusedError(
            f"{shown} belongs to another base model: {module} is {rows} x {columns} in it, and "
            f"{wanted[0]} x {wanted[1]} in the model served"
        )
