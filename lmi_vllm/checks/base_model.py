"""The base model's shapes and weights, read from its files; adapters are compared with them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lmi_vllm.checks.adapter_weights import any_base, limit_for_weight
from lmi_vllm.checks.safetensors_header import DamagedFileError, Shape, Tensor, read_tensors

logger = logging.getLogger(__name__)

_MATRIX: Final = 2
_QUANTISED: Final = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax")
_NUMBERS: Final = ("F64", "F32", "F16", "BF16")  # dtypes whose numbers are the weight's own


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The served model's names, and the shapes of its weights; adapters are compared with them.

    `shapes` and `weights` are by module name, without ".weight"; empty if they are not known.
    `stored` are the weights whose numbers are in the files, of a quantized model, too.
    """

    names: tuple[str, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    max_lora_rank: int = 16
    weights: Mapping[str, tuple[Path, Tensor]] = field(default_factory=dict)
    stored: Mapping[str, tuple[Path, Tensor]] = field(default_factory=dict)

    def limit(self, module: str) -> float:
        """Return the largest size of an adapter's product for this module."""
        if module not in self.weights:
            return any_base(module)
        try:
            return limit_for_weight(*self.weights[module])
        except OSError:  # the base's files are not needed once it is loaded
            return any_base(module)


def describe_base(model: Path, names: tuple[str, ...], max_lora_rank: int) -> BaseModel:
    """Return the base model that the files describe; damaged or missing files are ignored."""
    tensors: dict[str, tuple[Path, Tensor]] = {}
    try:
        for file in sorted(model.glob("*.safetensors")):
            tensors |= {name: (file, tensor) for name, tensor in read_tensors(file).items()}
    except (DamagedFileError, OSError) as error:
        logger.debug("no shapes of %s: %s", model, error)
        tensors = {}
    weights = stored = {
        name.removesuffix(".weight"): place
        for name, place in tensors.items()
        if name.endswith(".weight")
        and len(place[1].shape) == _MATRIX
        and place[1].dtype in _NUMBERS
    }
    if any(name.endswith(_QUANTISED) for name in tensors):
        weights = {}  # stored tensors have other shapes or values than the layers
    shapes = {name: tensor.shape for name, (_, tensor) in weights.items()}
    return BaseModel(names, shapes, max_lora_rank, weights, stored)
