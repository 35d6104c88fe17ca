"""How much device memory a model needs: an estimate, and the formula it follows."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import EXPERTS_ONLY
from lmi_vllm.features.validate.kv_cache import KvCache, kv_cache
from lmi_vllm.features.validate.model_shape import ModelShape, bytes_per_value
from lmi_vllm.features.validate.weights import Linear

GIB: Final = 1 << 30
# CUDA context, activations and graphs: a published log shows 3.05 GiB (docs/memory.md).
_RESERVE_BYTES: Final = 2 * GIB
_DEFAULT_UTILIZATION: Final = 0.92  # vLLM 0.32
_DEFAULT_RANK: Final = 16
# vLLM's default of max_num_batched_tokens by the memory of the device (get_batch_defaults, 0.32).
_LARGE_DEVICE: Final = 70 * GIB
_STEP_TOKENS: Final = 2048
_LARGE_STEP_TOKENS: Final = 8192
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
    "- 2 GiB for activations and graphs; "
    "KV bytes per token = layers / PP x values per layer (2 x KV heads / TP x head size) x bytes "
    "of kv_cache_dtype; layers with a sliding window keep no more than it; "
    "N = free / KV bytes per token"
)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The estimate for each GPU in bytes; None where a number was not known."""

    weight_bytes: int
    lora_bytes: int
    cache: KvCache
    utilization: float
    device_bytes: int | None
    free_bytes: int | None  # for the KV cache
    certain_bytes: int | None  # for the KV cache, if activations and graphs took no memory

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token that is inside the window of every layer."""
        return self.cache.bytes_per_token

    @property
    def longest_fit(self) -> int | None:
        """Tokens of the longest single sequence that fits."""
        return None if self.free_bytes is None else self.cache.longest(self.free_bytes)

    def can_hold(self, tokens: int) -> bool:
        """Whether one sequence might fit; also True where that is not known."""
        return self.certain_bytes is None or self.cache.longest(self.certain_bytes) >= tokens

    def sequences(self, tokens: int) -> float | None:
        """Return how many sequences of `tokens` the cache holds at once; None where not known."""
        return None if self.free_bytes is None else self.free_bytes / self.cache.bytes_of(tokens)

    def sentence(self, asked: int | None, longest: int | None) -> str:
        """Return the estimate as a message: its parts, what fits, and the formula."""
        head = f"estimate for each GPU: {self._parts()}"
        fit = self.longest_fit
        place = self._place()
        if fit is None:
            return f"{head}; give --device-memory GIB to see what fits. Formula: {FORMULA}"
        if self.kv_bytes_per_token == 0:
            fits = "fits" if fit > 0 else "the weights do not fit"
            return f"{head}; {fits} {place}. Formula: {FORMULA}"
        if fit <= 0:
            return f"{head}; the weights leave no room for a KV cache {place}. Formula: {FORMULA}"
        bound = min(fit, longest or fit)
        room = f"{fit} tokens of KV cache"
        if self.cache.sliding:
            room = f"{self.sequences(bound):.1f} sequences of that length"
        text = f"fits with max_model_len <= {bound} {place} ({room})"
        if asked and asked > 0:
            text += f"; max_model_len={asked} is about {self.sequences(asked):.1f} sequences"
        return f"{head}; {text}. Formula: {FORMULA}"

    def _parts(self) -> str:
        """Return what takes memory, in words."""
        text = f"weights {self.weight_bytes / GIB:.2f} GiB"
        if self.lora_bytes:
            text += f", LoRA slots {self.lora_bytes / GIB:.2f} GiB"
        text += f", KV cache {self.kv_bytes_per_token} bytes a token"
        if self.cache.sliding:
            text += f" ({self.cache.full} beyond the window)"
        return text

    def _place(self) -> str:
        """Return the memory that the cache has to fit into, in words."""
        if self.device_bytes is None:
            return "in the given kv_cache_memory_bytes"
        size = f"{self.device_bytes / GIB:.1f} GiB"
        return f"at gpu_memory_utilization {self.utilization:g} on {size}"


def estimate_memory(
    shape: ModelShape,
    arguments: Mapping[str, object],
    weight_bytes: int | None,
    device_bytes: int | None,
) -> MemoryEstimate | None:
    """Return the estimate; None where config.json does not give the numbers for one."""
    weights, cache = (
        _loaded_bytes(shape, arguments, weight_bytes),
        _cache(shape, arguments, device_bytes),
    )
    if weights is None or cache is None:
        return None
    tensor, stages = _parallel(arguments)
    utilization = arguments.get("gpu_memory_utilization")
    share = float(utilization) if isinstance(utilization, int | float) else _DEFAULT_UTILIZATION
    on_gpu, lora = weights // (tensor * stages), _lora_bytes(shape, arguments)
    free = limit = None
    fixed = arguments.get("kv_cache_memory_bytes")
    if isinstance(fixed, int):
        free = limit = fixed
    elif device_bytes is not None:
        limit = int(device_bytes * share) - on_gpu - lora
        free = limit - _RESERVE_BYTES
    return MemoryEstimate(on_gpu, lora, cache, share, device_bytes, free, limit)


def _cache(
    shape: ModelShape, arguments: Mapping[str, object], device_bytes: int | None
) -> KvCache | None:
    """Return the cache on one GPU; None where the sizes of heads or layers are not known."""
    values, layers = shape.kv_values_per_token_and_layer, shape.attention
    if values is None or layers is None:
        return None
    tensor, stages = _parallel(arguments)
    cache_dtype = str(arguments.get("kv_cache_dtype") or "auto")
    dtype = _dtype(shape, arguments) if cache_dtype == "auto" else cache_dtype
    # KV heads are split over at most as many GPUs as heads; a latent vector (MLA) is on every GPU.
    spread = 1 if shape.latent_size is not None else min(tensor, shape.kv_heads or 1)
    is_large = device_bytes is not None and device_bytes >= _LARGE_DEVICE
    step = arguments.get("max_num_batched_tokens")
    if not isinstance(step, int):
        step = _LARGE_STEP_TOKENS if is_large else _STEP_TOKENS
    in_flight = step * (stages + 1)  # a step for each stage, and the next one beside them
    return kv_cache(layers.of_stage(stages), values * bytes_per_value(dtype) / spread, in_flight)


def _parallel(arguments: Mapping[str, object]) -> tuple[int, int]:
    """Return the tensor and pipeline parallel sizes."""
    return _size(arguments, "tensor_parallel_size"), _size(arguments, "pipeline_parallel_size")


def _size(arguments: Mapping[str, object], name: str) -> int:
    """Return the integer argument `name`, at least 1."""
    value = arguments.get(name)
    return max(1, value) if isinstance(value, int) else 1


def _dtype(shape: ModelShape, arguments: Mapping[str, object]) -> str:
    """Return the dtype that the model runs in."""
    chosen = str(arguments.get("dtype") or "auto")
    if chosen != "auto":
        return chosen
    return "float16" if shape.dtype == "float32" else shape.dtype  # vLLM's rule for auto


def _loaded_bytes(
    shape: ModelShape, arguments: Mapping[str, object], weight_bytes: int | None
) -> int | None:
    """Return the bytes of the weights in memory, after a change of dtype or online quantization."""
    stored, target = bytes_per_value(shape.dtype), bytes_per_value(_dtype(shape, arguments))
    counted = shape.weights
    if shape.quant_method is not None:
        size = weight_bytes
        if counted is not None:
            size = size if size is not None else counted.stored_bytes(target)
            size = None if size is None else size + counted.padding_bytes
        return size
    numbers = counted.total if counted is not None else None
    if weight_bytes is not None:
        numbers = int(weight_bytes / stored)
    if numbers is None:
        return None
    method = str(arguments.get("quantization") or "")
    online = _ONLINE_BYTES.get(method, target)
    only_experts = method in EXPERTS_ONLY
    if only_experts and not shape.is_mixture:
        return int(numbers * target)
    # Where the layers are not known, all numbers count as quantized.
    quantized = counted.linear(only_experts=only_experts) if counted is not None else numbers
    return int(numbers * target - quantized * (target - online))


def _lora_bytes(shape: ModelShape, arguments: Mapping[str, object]) -> int:
    """Return the bytes of the LoRA slots on one GPU: max_loras x rank x (inputs + outputs).

    Tensor parallelism splits one of A and B, or both when they are fully sharded.
    """
    if arguments.get("enable_lora") is not True or shape.weights is None:
        return 0
    tensor, stages = _parallel(arguments)
    whole = tensor if arguments.get("fully_sharded_loras") is True else 1
    rank = arguments.get("max_lora_rank")
    size = _size(arguments, "max_loras") * (rank if isinstance(rank, int) else _DEFAULT_RANK)
    width = sum(_lora_width(one, tensor, whole) for one in shape.weights.layers)
    return int(size * width * 2 / stages)


def _lora_width(layer: Linear, tensor: int, whole: int) -> float:
    """Return the columns of A and B on one GPU, summed over these layers."""
    split, kept = layer.outputs, layer.inputs
    if layer.splits_inputs:
        split, kept = kept, split
    return layer.number * (split / tensor + kept / whole)
