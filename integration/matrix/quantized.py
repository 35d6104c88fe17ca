"""Llama's tiny checkpoint quantized ahead of time, and the reference that counts like its kernels.

The reference is Transformers' own model: its linear layers get the rounded weights, and where a
scheme rounds activations too, a hook rounds what goes into them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]

_INT8: Final = 127.0
_FP8: Final = torch.finfo(torch.float8_e4m3fn).max
_GROUP: Final = 32
_BITS: Final = 4
_PACKED: Final = 8  # numbers of 4 bits in an int32
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def linears(model: Any) -> list[tuple[str, Any]]:
    """The layers that are quantized: every linear one but the head."""
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    ]


def _rounded(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers (or FP8) and their scale, by row."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-10) / most
    if most == _FP8:
        return (values / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale
    return (values / scale).round().clamp(-128, 127).to(torch.int8), scale


def _through(values: torch.Tensor, most: float) -> torch.Tensor:
    """What is left of `values` after rounding."""
    whole, scale = _rounded(values, most)
    return whole.to(values.dtype) * scale


def _reference(most: float) -> Callable[[Any], None]:
    def round_layers(model: Any) -> None:
        for _, layer in linears(model):
            layer.weight.copy_(_through(layer.weight, most))
            layer.register_forward_pre_hook(lambda _, taken: (_through(taken[0], most),))

    return round_layers


def _w8a8(kind: str, form: str, most: float) -> Callable[[Tensors, Config], None]:
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}

    def write(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            whole, scale = _rounded(tensors[name], most)
            tensors[name], tensors[f"{name}_scale"] = whole, scale
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": numbers | {"strategy": "channel", "dynamic": False},
                "input_activations": numbers | {"strategy": "token", "dynamic": True},
            }},
        }  # fmt: skip

    return write


def _packed(numbers: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Eight numbers of 4 bits in each int32, along the last axis."""
    parts = numbers.to(torch.int64).unflatten(-1, (-1, _PACKED))
    shifts = torch.tensor([_BITS * place for place in order])
    total = (parts << shifts).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def _four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 0 to 15 around 8 and their scale, by group of inputs; both [inputs, outputs]."""
    groups = weight.T.unflatten(0, (-1, _GROUP))
    scale = groups.abs().amax(1, keepdim=True) / 7
    numbers = (groups / scale).round().clamp(-8, 7) + 8
    return numbers.flatten(0, 1), scale.squeeze(1)


def _awq(tensors: Tensors, config: Config) -> None:
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        numbers, scale = _four_bits(tensors.pop(name))
        start = name.removesuffix("weight")
        places = tuple(_AWQ_ORDER.index(place) for place in range(_PACKED))
        tensors[f"{start}qweight"] = _packed(numbers, places)
        tensors[f"{start}qzeros"] = _packed(torch.full(scale.shape, 8), places)
        tensors[f"{start}scales"] = scale.to(torch.float16)
    config["quantization_config"] = {
        "quant_method": "awq", "bits": _BITS, "group_size": _GROUP, "zero_point": True,
        "version": "gemm",
    }  # fmt: skip


def _gptq(tensors: Tensors, config: Config) -> None:
    straight = tuple(range(_PACKED))
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        numbers, scale = _four_bits(tensors.pop(name))
        start, inputs = name.removesuffix("weight"), numbers.shape[0]
        tensors[f"{start}qweight"] = _packed(numbers.T, straight).T.contiguous()
        tensors[f"{start}qzeros"] = _packed(torch.full(scale.shape, 7), straight)
        tensors[f"{start}scales"] = scale.to(torch.float16)
        tensors[f"{start}g_idx"] = torch.arange(inputs, dtype=torch.int32) // _GROUP
    config["quantization_config"] = {
        "quant_method": "gptq", "bits": _BITS, "group_size": _GROUP, "desc_act": False,
        "sym": True,
    }  # fmt: skip


def _four_bit_reference(model: Any) -> None:
    for _, layer in linears(model):
        numbers, scale = _four_bits(layer.weight)
        groups = (numbers - 8).unflatten(0, (-1, _GROUP)) * scale.half().float()[:, None]
        layer.weight.copy_(groups.flatten(0, 1).T)


WRITTEN: Final[Mapping[str, Callable[[Tensors, Config], None]]] = MappingProxyType(
    {
        "int8": _w8a8("int", "int-quantized", _INT8),
        "fp8": _w8a8("float", "float-quantized", _FP8),
        "awq": _awq,
        "gptq": _gptq,
    }
)
REFERENCES: Final[Mapping[str, Callable[[Any], None]]] = MappingProxyType(
    {
        "int8": _reference(_INT8),
        "fp8": _reference(_FP8),
        "awq": _four_bit_reference,
        "gptq": _four_bit_reference,
    }
)
