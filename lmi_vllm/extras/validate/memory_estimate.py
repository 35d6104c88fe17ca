"""How much device memory a model needs: an estimate, and the formula it follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import EXPERTS_ONLY
from lmi_vllm.extras.validate.model_shape import ModelShape, bytes_per_value

GIB: Final = 1 << 30
_RESERVE_BYTES: Final = GIB  # CUDA context, workspace and graphs; measured by vLLM, guessed here
_DEFAULT_UTILIZATION: Final = 0.92  # vLLM 0.32
_DEFAULT_RANK: Final = 16
# Methods that quantize 16-bit weights while loading, and bytes per weight afterwards.
_ONLINE_BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "fp8": 1.0, "fp8_per_tensor": 1.0, "fp8_per_block": 1.0, "fp8_per_channel": 1.0,
        "int8_per_channel_weight_only": 1.0, "experts_int8": 1.0, "mxfp8": 1.03,
        "nvfp4_per_token": 0.56,
    }
)  # fmt: skip

FORMULA: Final = (
    "free = device memory x gpu_memory_utilization - weights / (TP x PP) - LoRA slots "
    "- 1 GiB for activations and graphs; "
    "KV bytes per token = layers / PP x values per layer (2 x KV heads / TP x head size) x bytes "
    "of kv_cache_dtype; N = free / KV bytes per token"
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on each GPU; None where something was not known."""

    weight_bytes: int
    lora_bytes: int
    kv_bytes_per_token: int
    utilization: float
    device_bytes: int | None
    longest_fit: int | None  # tokens of KV cache
    certain_limit: int | None  # tokens that fit if nothing else took any memory

    def sentence(self, asked: int | None, longest: int | None) -> str:
        """The estimate in words: what fits, and that it is an estimate."""
        parts = f"weights {self.weight_bytes / GIB:.2f} GiB"
        if self.lora_bytes:
            parts += f", LoRA slots {self.lora_bytes / GIB:.2f} GiB"
        head = f"estimate for each GPU: {parts}, KV cache {self.kv_bytes_per_token} bytes a token"
        if self.longest_fit is None:
            return f"{head}; give --device-memory GIB to see what fits. Formula: {FORMULA}"
        if self.device_bytes is None:
            place = "in the given kv_cache_memory_bytes"
        else:
            size = f"{self.device_bytes / GIB:.1f} GiB"
            place = f"at gpu_memory_utilization {self.utilization:g} on {size}"
        if self.longest_fit <= 0:
            return f"{head}; the weights leave no room for a KV cache {place}. Formula: {FORMULA}"
        bound = min(self.longest_fit, longest or self.longest_fit)
        fit = f"fits with max_model_len <= {bound} {place} ({self.longest_fit} tokens of KV cache)"
        if asked and asked > 0:
            fit += f"; max_model_len={asked} is about {self.longest_fit / asked:.1f} sequences"
        return f"{head}; {fit}. Formula: {FORMULA}"


def estimate_memory(
    shape: ModelShape,
    arguments: Mapping[str, object],
    weight_bytes: int | None,
    device_bytes: int | None,
) -> MemoryEstimate | None:
    """The estimate; None where config.json does not give the numbers for one."""
    values, layers = shape.kv_values_per_token_and_layer, shape.layers
    weights = _loaded_bytes(shape, arguments, weight_bytes)
    if values is None or layers is None or weights is None:
        return None
    tensor, stages = (
        _size(arguments, "tensor_parallel_size"),
        _size(arguments, "pipeline_parallel_size"),
    )
    cache_dtype = str(arguments.get("kv_cache_dtype") or "auto")
    dtype = _dtype(shape, arguments) if cache_dtype == "auto" else cache_dtype
    spread = 1 if shape.latent_size is not None else min(tensor, shape.kv_heads or 1)
    per_token = -(-layers // stages) * values * bytes_per_value(dtype) / spread
    utilization = arguments.get("gpu_memory_utilization")
    share = float(utilization) if isinstance(utilization, int | float) else _DEFAULT_UTILIZATION
    on_gpu = weights // (tensor * stages)
    lora = _lora_bytes(shape, arguments) // (tensor * stages)
    fit = limit = None
    fixed = arguments.get("kv_cache_memory_bytes")
    if isinstance(fixed, int):
        fit = limit = int(fixed / max(per_token, 1))
    elif device_bytes is not None:
        left = device_bytes * share - on_gpu - lora
        fit = int((left - _RESERVE_BYTES) / max(per_token, 1))
        limit = int(left / max(per_token, 1))
    return MemoryEstimate(on_gpu, lora, int(per_token), share, device_bytes, fit, limit)


def _size(arguments: Mapping[str, object], name: str) -> int:
    """A parallel size, at least 1."""
    value = arguments.get(name)
    return max(1, value) if isinstance(value, int) else 1


def _dtype(shape: ModelShape, arguments: Mapping[str, object]) -> str:
    """The number format the model runs in."""
    chosen = str(arguments.get("dtype") or "auto")
    if chosen != "auto":
        return chosen
    return "float16" if shape.dtype == "float32" else shape.dtype  # vLLM's rule for auto


def _loaded_bytes(
    shape: ModelShape, arguments: Mapping[str, object], weight_bytes: int | None
) -> int | None:
    """The weights in memory: the files' size, changed by dtype or quantization while loading."""
    size = weight_bytes if weight_bytes is not None else _counted_bytes(shape)
    if size is None or shape.quant_method is not None:
        return size
    stored = bytes_per_value(shape.dtype)
    method = str(arguments.get("quantization") or "")
    target = bytes_per_value(_dtype(shape, arguments))
    if shape.is_mixture or method not in EXPERTS_ONLY:
        target = _ONLINE_BYTES.get(method, target)
    return int(size * target / stored)


def _counted_bytes(shape: ModelShape) -> int | None:
    """Weights counted from the shape of a plain decoder; a mixture of experts is not one."""
    layer, layers = _layer_widths(shape), shape.layers
    if layer is None or layers is None or shape.is_mixture:
        return None
    inner = sum(inputs * outputs for inputs, outputs in layer)
    embedding = 2 * (shape.vocabulary or 0) * (shape.hidden_size or 0)
    return int((layers * inner + embedding) * bytes_per_value(shape.dtype))


def _layer_widths(shape: ModelShape) -> list[tuple[int, int]] | None:
    """(inputs, outputs) of the linear layers in one decoder layer."""
    hidden, middle = shape.hidden_size, shape.intermediate_size
    if not (hidden and middle and shape.heads and shape.kv_heads and shape.head_size):
        return None
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return [
        (hidden, query), (hidden, key), (hidden, key), (query, hidden),
        (hidden, middle), (hidden, middle), (middle, hidden),
    ]  # fmt: skip


def _lora_bytes(shape: ModelShape, arguments: Mapping[str, object]) -> int:
    """The adapter slots: max_loras x rank x (inputs + outputs) of every linear layer."""
    layer = _layer_widths(shape)
    if arguments.get("enable_lora") is not True or layer is None:
        return 0
    slots = _size(arguments, "max_loras")
    rank = arguments.get("max_lora_rank")
    width = sum(inputs + outputs for inputs, outputs in layer)
    size = rank if isinstance(rank, int) else _DEFAULT_RANK
    return int(slots * size * width * (shape.layers or 0) * 2)
