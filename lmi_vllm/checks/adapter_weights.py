"""Refuses adapter weights that could put NaN into the KV cache.

A weight that is not finite, or a product far larger than the weight it is added to, makes hidden
states that are not finite. They stay in blocks of the KV cache, which other requests get later. So
the size (root mean square) of alpha / rank x B x A is compared with that of the base's weight. It
is computed from small matrices: the sum over (B'B) * (AA') is the squared Frobenius norm of BA.
Weights are read in blocks, without torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

from lmi_vllm.checks.adapter_config import LoraScales, module_of
from lmi_vllm.checks.adapter_names import plain_name
from lmi_vllm.checks.safetensors_header import Tensor
from lmi_vllm.errors import AdapterRefusedError

# A trained adapter's product is a fraction of the weight that it changes. Ten times that weight is
# no adaptation. Nearly zero weights count as ones of usual size.
MAX_RATIO_TO_BASE: Final = 10.0
USUAL_SIZE: Final = 0.02
MAX_ROUNDING: Final = 0.01  # of a weight's size; rounding to bfloat16 changes 0.002 of it
UNKNOWN_LIMIT: Final = 1.0  # of the product's size, if the base's weights are not known
LARGEST_NUMBER: Final = 1e4  # of a scaled weight: half precision ends at 65504
_BLOCK_NUMBERS: Final = 1 << 20
_WIDEST_GRAM: Final = 2048  # above it, and for tensors that are no matrices, norms are multiplied
_SAMPLES: Final = 8  # numbers of a base weight that are sampled
_SAMPLE_NUMBERS: Final = 4096
_A: Final = "lora_A"
_B: Final = "lora_B"
_BASE_LAYER: Final = "base_layer"
_HEADS: Final = ("score", "classifier")  # of classification, which vLLM takes whole
_TOKENS: Final = "trainable_tokens_"
# Tensors of PEFT's variants of LoRA, and the variant with its field of adapter_config.json.
_TRAINED_WITH: Final = (
    ("lora_magnitude_vector", "DoRA (use_dora)"),
    ("lora_diag", "KaSA (kasa_config)"),
    ("lora_velora_", "VeLoRA (velora_config)"),
    ("lora_monteclora_", "MonteCLoRA (monteclora_config)"),
)
_EMBEDDINGS: Final = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
_HEAD_NAMES: Final = ("lm_head", "embed_out")
_PARTS: Final = frozenset({_A, _B})
_MATRIX: Final = 2
Limit = Callable[[str], float]


@dataclass(slots=True)
class _Factor:
    """One factor (A or B) of an adapter's product, reduced to what its norm needs."""

    side: int  # of the product: columns of A, rows of B
    square: float = 0.0  # of the Frobenius norm
    gram: Any = None  # over the rank; None if the rank is too large


def any_base(_module: str) -> float:
    """Return the largest RMS of a product where the base weight is not known."""
    return UNKNOWN_LIMIT


def limit_for_weight(path: Path, tensor: Tensor) -> float:
    """Return the largest RMS of a product added to this base weight, from samples of the weight.

    Raises:
        OSError: the file cannot be read.
    """
    if find_spec("numpy") is None:
        return UNKNOWN_LIMIT
    numbers = math.prod(tensor.shape)
    count = min(_SAMPLE_NUMBERS, numbers)
    square = 0.0
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            first = (numbers - count) * sample // (_SAMPLES - 1)
            values = _numbers(file, tensor, first, count)
            square += float((values * values).mean(dtype="f8")) / _SAMPLES if count else 0.0
    return MAX_RATIO_TO_BASE * max(math.sqrt(square), USUAL_SIZE)


def check_values(
    path: Path, tensors: Mapping[str, Tensor], scales: LoraScales, shown: str, limit: Limit
) -> None:
    """Check that every weight is finite and every product is below its module's `limit`.

    Without numpy no engine computes with weights, and nothing is checked.

    Raises:
        AdapterRefusedError: names the module and what is wrong with it.
        OSError: the file cannot be read.
    """
    if find_spec("numpy") is None:
        return
    modules = _modules(tensors, shown)
    with path.open("rb") as file:
        for module, parts in modules.items():
            _check_module(file, parts, scales.of(module), f"{shown}: {module}", limit(module))


def check_parts(tensors: Mapping[str, Tensor], scales: LoraScales, shown: str) -> None:
    """Check that there is nothing but LoRA's factors, whole, and of the rank that scales them.

    Raises:
        AdapterRefusedError: names the weight and what is wrong with it.
    """
    for name, tensor in tensors.items():
        module, part = module_of(plain_name(name).removesuffix(".bias"))
        if part not in (*_PARTS, _BASE_LAYER, *_HEADS):
            raise AdapterRefusedError(f"{shown}: {_whole(name)}")
        if not math.prod(tensor.shape):
            raise AdapterRefusedError(
                f"{shown}: {name} is empty, as DeepSpeed's ZeRO-3 saves weights that were not "
                "gathered: save the adapter again with gathered weights"
            )
        if part == _A and len(tensor.shape) == _MATRIX and ".experts" not in module:
            _check_rank(module, tensor.shape[0], scales.rank_of(module_of(name)[0]), shown)


def _check_rank(module: str, rank: int, stated: int, shown: str) -> None:
    if stated != rank:
        raise AdapterRefusedError(
            f"{shown}: {module} has rank {rank} in its weights and {stated} in "
            "adapter_config.json (r, rank_pattern), so its scale would be wrong"
        )


def _whole(name: str) -> str:
    """Return what to say of a weight that is no factor."""
    if _TOKENS in name:
        return (
            f"{name} trains single tokens (trainable_token_indices), which vLLM does not support: "
            "merge the adapter into the model"
        )
    for part, trained in _TRAINED_WITH:
        if part in name:
            return (
                f"{name} is a part of {trained}, which vLLM does not support: merge the adapter "
                "into the model"
            )
    return (
        f"{name} is a whole weight, of modules_to_save or of a vocabulary that was resized; vLLM "
        "serves LoRA's factors only: train the adapter without it, or merge it into the model"
    )


def check_base_layers(
    path: Path, tensors: Mapping[str, Tensor], base: Mapping[str, tuple[Path, Tensor]], shown: str
) -> Sequence[str]:
    """Check that the base's weights in an adapter are those of the served model, by samples.

    PEFT saves them beside adapters of embeddings and heads. vLLM reads none of them. Returned are
    the modules whose weights are not in the model's files, so that they could not be compared.

    Raises:
        AdapterRefusedError: they are of another model, or of a vocabulary that was resized.
        OSError: a file cannot be read.
    """
    unknown = []
    for name, tensor in tensors.items():
        module, part = module_of(name)
        if part != _BASE_LAYER:
            continue
        if (place := base.get(module) or _tied(module, base)) is None:
            unknown.append(module)
            continue
        if tensor.shape != place[1].shape:
            found, served = (" x ".join(map(str, one.shape)) for one in (tensor, place[1]))
            raise AdapterRefusedError(
                f"{shown}: the base's weight of {module} is {found} in it and {served} in the "
                "model served: it belongs to another model, or to one whose vocabulary was resized"
            )
        if find_spec("numpy") is not None and not _is_same(path, tensor, *place):
            raise AdapterRefusedError(
                f"{shown} belongs to another base model: the base's weight of {module} in it is "
                "not that of the model served"
            )
    return unknown


def _tied(module: str, base: Mapping[str, tuple[Path, Tensor]]) -> tuple[Path, Tensor] | None:
    """Return the weight that a head shares with the embedding, or the reverse: one is stored."""
    last = module.rpartition(".")[2]
    others = _HEAD_NAMES if last in _EMBEDDINGS else _EMBEDDINGS if last in _HEAD_NAMES else ()
    found = [place for name, place in base.items() if name.rpartition(".")[2] in others]
    return found[0] if len(found) == 1 else None


def _is_same(path: Path, tensor: Tensor, base_path: Path, base: Tensor) -> bool:
    """Whether samples of two tensors differ by no more than the rounding of number formats."""
    numbers, error, size = math.prod(tensor.shape), 0.0, 0.0
    count = min(_SAMPLE_NUMBERS, numbers)
    with path.open("rb") as file, base_path.open("rb") as base_file:
        for sample in range(_SAMPLES):
            first = (numbers - count) * sample // (_SAMPLES - 1)
            ours = _numbers(file, tensor, first, count).astype("f8")
            theirs = _numbers(base_file, base, first, count).astype("f8")
            error += float(((ours - theirs) ** 2).sum())
            size += float((theirs**2).sum())
    return math.sqrt(error) <= MAX_ROUNDING * math.sqrt(size)


def _modules(tensors: Mapping[str, Tensor], shown: str) -> Mapping[str, Mapping[str, Tensor]]:
    """Return the parts of each module; of a part that is there twice the engine takes one.

    Two names that only the model maps to one part are refused by the workers, which have its table.

    Raises:
        AdapterRefusedError: weights come twice.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, part = module_of(name)
        if part not in _PARTS:  # a full tensor: vLLM refuses it, except for some heads
            modules[name] = {part: tensor}
            continue
        parts = modules.setdefault(module, {})
        if part in parts:
            raise AdapterRefusedError(f"{shown}: {part} of {module} comes twice")
        parts[part] = tensor
    return modules


def _check_module(
    file: BinaryIO, parts: Mapping[str, Tensor], scale: float, shown: str, limit: float
) -> None:
    factors = {
        part: _read(file, tensor, part, max(abs(scale), 1.0) if part == _B else 1.0, shown)
        for part, tensor in parts.items()
    }
    if factors.keys() >= _PARTS:
        size = abs(scale) * _size(factors[_A], factors[_B])
        if not size <= limit:
            raise AdapterRefusedError(
                f"{shown}: lora_alpha / r x lora_B x lora_A has a mean size of {size:.3g}; "
                f"more than {limit:.3g} would drown the base model's weights"
            )
    elif alone := factors.keys() & _PARTS:
        raise AdapterRefusedError(f"{shown} has {alone.pop()} only")


def _size(a: _Factor, b: _Factor) -> float:
    """Return the root mean square of B x A, or an upper bound without Gram matrices."""
    if a.gram is not None and b.gram is not None and a.gram.shape == b.gram.shape:
        square = max(float((a.gram * b.gram).sum()), 0.0)
    else:
        square = a.square * b.square
    return math.sqrt(square / max(a.side * b.side, 1))


def _read(file: BinaryIO, tensor: Tensor, part: str, scale: float, shown: str) -> _Factor:
    """Return the factor, after checking every number of it.

    Raises:
        AdapterRefusedError: one is not finite, or too large once scaled.
    """
    factor = _Factor((1, 1, *tensor.shape)[-1 if part == _A else -2])
    for block in _blocks(file, tensor, part):
        largest = max(float(block.max()), -float(block.min())) * scale
        if not largest <= LARGEST_NUMBER:  # also true of NaN
            what = f"as large as {largest:.3g}" if math.isfinite(largest) else "that are not finite"
            raise AdapterRefusedError(f"{shown} has weights {what} in {part}")
        factor.square += float((block * block).sum(dtype="f8"))
        if block.ndim == _MATRIX:
            gram = (block.T @ block).astype("f8")
            factor.gram = gram if factor.gram is None else factor.gram + gram
    return factor


def _blocks(file: BinaryIO, tensor: Tensor, part: str) -> Iterator[Any]:
    """Yield the numbers of a tensor: A and B as matrices whose second side is the rank."""
    if not math.prod(tensor.shape):
        return
    is_a = part == _A
    rank = tensor.shape[0 if is_a else -1] if len(tensor.shape) == _MATRIX else 0
    if part not in _PARTS or not 0 < rank <= _WIDEST_GRAM:
        total = math.prod(tensor.shape)
        for first in range(0, total, _BLOCK_NUMBERS):
            yield _numbers(file, tensor, first, min(_BLOCK_NUMBERS, total - first))
        return
    length = math.prod(tensor.shape) // rank
    step = max(_BLOCK_NUMBERS // rank, 1)
    for first in range(0, length, step):
        count = min(step, length - first)
        if not is_a:
            yield _numbers(file, tensor, first * rank, count * rank).reshape(count, rank)
        elif count == length:
            yield _numbers(file, tensor, 0, rank * length).reshape(rank, length).T
        else:
            yield _columns(file, tensor, first, count)


def _columns(file: BinaryIO, tensor: Tensor, first: int, count: int) -> Any:
    """Return some columns of a matrix, transposed."""
    import numpy as np  # noqa: PLC0415 (it comes with vLLM)

    rows, length = tensor.shape
    return np.stack(
        [_numbers(file, tensor, row * length + first, count) for row in range(rows)], axis=1
    )


def _numbers(file: BinaryIO, tensor: Tensor, first: int, count: int) -> Any:
    """Return numbers of a tensor as floats of 32 bits, of 64 where they are stored so.

    Raises:
        OSError: the file has become shorter.
    """
    import numpy as np  # noqa: PLC0415 (it comes with vLLM)

    file.seek(tensor.start + first * tensor.item_bytes)
    data = file.read(count * tensor.item_bytes)
    if len(data) < count * tensor.item_bytes:
        raise OSError(None, "the file of its weights was truncated while it was read")
    match tensor.dtype:
        case "BF16":
            return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        case "F8_E5M2":
            return (np.frombuffer(data, "u1").astype("<u2") << 8).view("<f2").astype("<f4")
        case "F8_E4M3":
            return _four_three(np)[np.frombuffer(data, "u1")]
        case "F8_E8M0":
            powers = np.exp2(np.arange(256, dtype="<f8") - 127)
            powers[255] = np.nan
            return powers[np.frombuffer(data, "u1")]
        case "F64":
            return np.frombuffer(data, "<f8")
    kind = {"B": "u", "U": "u", "I": "i", "F": "f"}[tensor.dtype[0]]
    return np.frombuffer(data, f"<{kind}{tensor.item_bytes}").astype("<f4")


def _four_three(np: Any) -> Any:
    """Return the 256 values of F8_E4M3: four bits of exponent, no infinity, one NaN per sign."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, bits & 7
    values = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * np.exp2(exponent - 10.0)
    ).astype("<f4")
    values[127] = values[255] = np.nan
    return np.where(bits & 128, -values, values).astype("<f4")
