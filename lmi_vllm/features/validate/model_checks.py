"""Settings against the model's own config.json: what vLLM would refuse, found before it starts."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import checkpoint_warnings, is_of_transformers, unsupported_quantization
from lmi_vllm.config.variable_names import closest
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.features.validate.model_shape import ModelShape
from lmi_vllm.translate.configuration import Configuration

# Quantization method of a checkpoint -> vLLM's methods that can load it.
_FAMILIES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "awq": ("awq", "auto_awq", "awq_marlin", "moe_wna16", "inc"),
        "gptq": ("gptq", "auto_gptq", "gptq_marlin", "moe_wna16", "inc"),
        "fp8": ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
        "mxfp4": ("mxfp4", "gpt_oss_mxfp4"),
        "modelopt": ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    }
)
# Methods that only read a checkpoint quantized ahead of time.
_NEED_CHECKPOINT: Final = (
    "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "moe_wna16",
    "compressed-tensors", "quark", "modelopt", "modelopt_fp4", "modelopt_mixed", "fbgemm_fp8",
)  # fmt: skip
# Ends of the names of classes: vLLM makes a class of one end out of one of another, such as a
# reward model out of LlamaForCausalLM (vLLM 0.31 to 0.33: config/model.py, _SUFFIX_TO_DEFAULTS).
_ENDS: Final = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding",
    "EmbeddingModel", "ForSequenceClassification", "ForTokenClassification",
    "ForAudioClassification", "ForImageClassification", "ForVideoClassification",
    "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip
_NEED_16_BIT: Final = ("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin")


@dataclass(frozen=True, slots=True)
class Findings:
    """The warnings and errors of the checks, as messages."""

    warnings: tuple[str, ...]
    errors: tuple[str, ...]


def check_model(
    shape: ModelShape,
    arguments: Mapping[str, object],
    configuration: Configuration,
) -> Findings:
    """Return the findings of all checks; `arguments` are the engine's."""
    engine = configuration.translator.engines.of(shape.architectures, arguments)
    if engine is not None:
        own = engine.runs(shape.architectures, arguments)
        return Findings((f"{own} is served by the {engine.name}, not by vLLM",), ())
    errors = [*_parallel(shape, arguments), *_quantization(shape, arguments)]
    warnings = [*checkpoint_warnings(shape, arguments)]
    (warnings if _has_backend(shape, arguments) else errors).extend(
        _architecture(shape, arguments, configuration.model_classes)
    )
    return Findings(tuple(warnings), tuple(errors))


def _architecture(
    shape: ModelShape, arguments: Mapping[str, object], added: Collection[str]
) -> Iterator[str]:
    """Yield a message unless vLLM has the architecture, or the model brings its own code."""
    release = load_release()
    served = served_architectures(shape.architectures, arguments)
    if not served:
        yield "config.json names no architectures: vLLM has only its model_type to go by"
        return
    known = {*release.architectures, *added}
    if any(_is_made_of(name, known) for name in served):
        return
    if arguments.get("model_impl") == "transformers" or (
        shape.has_own_code and arguments.get("trust_remote_code") is True
    ):
        return
    names = ", ".join(served)
    advice = closest(served[0], release.architectures)
    if _has_backend(shape, arguments):
        advice = "it is tried with vLLM's Transformers backend, which does not run every model"
    code = "; its own code needs option.trust_remote_code=true" if shape.has_own_code else ""
    yield f"architecture {names} is not known to vLLM {release.release}{code}; {advice}"


def _has_backend(shape: ModelShape, arguments: Mapping[str, object]) -> bool:
    """Whether Transformers has the family, so that vLLM's backend for it might run the model."""
    is_own = served_architectures(shape.architectures, arguments) == shape.architectures
    return is_own and not shape.has_own_code and is_of_transformers(shape.family)


def _is_made_of(name: str, known: Collection[str]) -> bool:
    """Whether vLLM has this class, or one that it turns into it."""
    end = next(filter(name.endswith, _ENDS), None)
    others = () if end is None else (name.removesuffix(end) + other for other in _ENDS)
    return name in known or any(other in known for other in others)


def served_architectures(
    architectures: tuple[str, ...], arguments: Mapping[str, object]
) -> tuple[str, ...]:
    """Return the names that vLLM looks up: those of `hf_overrides` where it has some."""
    overrides = arguments.get("hf_overrides")
    named = overrides.get("architectures") if isinstance(overrides, Mapping) else None
    return tuple(map(str, named)) if isinstance(named, list | tuple) else architectures


def _parallel(shape: ModelShape, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield an error where KV heads or layers cannot be split over the devices."""
    tensor, stages = arguments.get("tensor_parallel_size"), arguments.get("pipeline_parallel_size")
    if isinstance(tensor, int) and shape.kv_heads and shape.latent_size is None:
        more, fewer = max(tensor, shape.kv_heads), min(tensor, shape.kv_heads)
        if more % fewer:
            yield (
                f"tensor_parallel_size={tensor} and the model's {shape.kv_heads} KV heads do not "
                f"divide each other"
            )
    if isinstance(stages, int) and shape.layers and stages > shape.layers:
        yield f"pipeline_parallel_size={stages} is above the model's {shape.layers} layers"


def _quantization(shape: ModelShape, arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield an error where the quantization method cannot load the checkpoint."""
    asked, stored = arguments.get("quantization"), shape.quant_method
    yield from unsupported_quantization(shape)
    if not isinstance(asked, str):
        return
    if stored is None and asked in _NEED_CHECKPOINT:
        yield (
            f"quantization={asked} needs a checkpoint quantized that way and config.json has no "
            f"quantization_config; leave it out, or use fp8"
        )
    elif stored is not None and asked not in (stored, *_FAMILIES.get(stored, ())):
        yield f"quantization={asked} does not match the checkpoint's own method, {stored}"
    if asked in _NEED_16_BIT and arguments.get("dtype") in ("float32", "float"):
        yield f"quantization={asked} needs dtype float16 or bfloat16, not {arguments['dtype']}"
