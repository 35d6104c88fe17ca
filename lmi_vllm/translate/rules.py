"""Options with a rule of their own for their engine arguments."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.value_rules import EMBEDDING_ENGINES
from lmi_vllm.config.vllm_schema import installed_release, load_release
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.messages import DEFAULT_ORIGIN, Origin, OriginKind
from lmi_vllm.sources.local import is_directory, is_file, without_file_scheme
from lmi_vllm.translate.draft import ArgumentDraft

_TASKS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "auto": ("auto", "auto"),
        "text-generation": ("generate", "auto"),
        "generate": ("generate", "auto"),
        "text-embedding": ("auto", "embed"),
        "feature-extraction": ("pooling", "embed"),
        "classify": ("auto", "classify"),
        "text2text-generation": ("auto", "auto"),
        "conversational": ("auto", "auto"),
        "embed": ("pooling", "embed"),
        "embedding": ("pooling", "embed"),
        "score": ("pooling", "auto"),
        "rerank": ("pooling", "auto"),
    }
)
_PREQUANTIZED: Final = "use option.quantize=fp8 or a checkpoint quantized ahead of time (awq, gptq)"
_W8A8: Final = "use a compressed-tensors W8A8 checkpoint, or option.quantize=fp8"


def load_format(draft: ArgumentDraft) -> None:
    """Refuse the one format that only another container reads."""
    model = draft.settings.model
    if model.load_format == "sagemaker_fast_model_loader":
        draft.fail(
            f"{model.details.load_format.label}: sagemaker_fast_model_loader is not available "
            f"here; use runai_streamer, sharded_state or leave it out",
            model.details.load_format,
        )
    elif model.load_format is not None:
        draft.put("load_format", model.load_format, model.details.load_format.origin)


def model_dir(draft: ArgumentDraft) -> None:
    """Warn of a directory of weights that is not used."""
    settings, model = draft.settings.model, draft.model
    if settings.model_dir is None or model is None:
        return
    if str(Path(without_file_scheme(settings.model_dir))) != model.reference:
        named = settings.details.model_id
        other = named.stated if named.is_set else model.reference
        setting = settings.details.model_dir
        draft.warn(f"{setting.label} has no effect: the model is {mask_urls(other)}", setting)


def tokenizer_mode(draft: ArgumentDraft) -> None:
    """Warn: vLLM no longer has slow tokenizers."""
    model = draft.settings.model
    if model.tokenizer_mode is None:
        return
    mode, setting = model.tokenizer_mode, model.details.tokenizer_mode
    if mode == "slow":
        draft.warn(f"{setting.label}: slow is gone from vLLM; auto is used", setting)
    draft.put("tokenizer_mode", "auto" if mode == "slow" else mode, setting.origin)


def task(draft: ArgumentDraft) -> None:
    """Runner and convert of the task; explicit ones win."""
    named, setting = draft.settings.model.task, draft.settings.model.details.task
    text = named.replace("_", "-")
    if setting.is_set and text not in _TASKS:
        draft.warn(
            f"{setting.label}: task {named} is not known and counts as auto; known are "
            f"{', '.join(_TASKS)}",
            setting,
        )
    runner, convert = _TASKS.get(text, ("auto", "auto"))
    for argument, value in (("runner", runner), ("convert", convert)):
        explicit = draft.values.get(argument, value)
        if setting.is_set and explicit != value:
            draft.warn(
                f"{draft.label(argument)}={explicit} is used; {setting.stated} "
                f"would mean {argument}={value}",
                setting,
            )
        draft.put_if_unset(argument, value, setting.origin)


def batch_sizes(draft: ArgumentDraft) -> None:
    """Warn of sizes of LMI's batches; those of embedding engines have no warning of their own."""
    server = draft.settings.server
    if server.engine in EMBEDDING_ENGINES:
        return
    for setting in (server.details.batch_size, server.details.max_dynamic_batch_size):
        if setting.value not in (None, "1"):
            draft.warn(f"{setting.label} has no effect: continuous batching is always on", setting)


def quantization(draft: ArgumentDraft) -> None:
    """The quantization method out of `quantize`, `load_in_8bit` and `load_in_4bit`."""
    model, said = draft.settings.model, draft.settings.model.details
    chosen, result, origin = said.quantize, None, DEFAULT_ORIGIN
    if model.quantize is not None:
        result, origin = _quantization_method(draft, chosen, model.quantize), chosen.origin
    bits = {"bitsandbytes8": said.load_in_8bit, "bitsandbytes4": said.load_in_4bit}
    for stands_for, setting in bits.items():
        if not setting.value:
            continue
        method = _quantization_method(draft, setting, stands_for)
        if chosen.is_set and method != result:
            draft.fail(
                f"{setting.stated} and {chosen.stated} ask for different "
                f"quantization: set one of them",
                setting,
                chosen,
            )
        elif not chosen.is_set:
            result, origin = method, setting.origin
    draft.put("quantization", result, origin)
    if result in load_release().deprecated_quantization_methods:
        draft.put_if_unset("allow_deprecated_quantization", True, origin)


def _quantization_method(draft: ArgumentDraft, setting: Setting, text: str) -> str | None:
    """Return vLLM's name of quantization `text`; report methods that are not possible."""
    release = load_release()
    method = text.lower()
    if method in release.quantization_methods:
        return method
    if method in ("bitsandbytes", "bitsandbytes8", "dynamic_int8"):
        if method != "dynamic_int8" and "bitsandbytes" in release.quantization_methods:
            return "bitsandbytes"
        draft.warn(
            f"{setting.label}: vLLM has no {method} any more; fp8 is used, which rounds the "
            f"weights of every layer to 8 bits while they are loaded",
            setting,
        )
        return "fp8"
    known = f"allowed are {', '.join(release.quantization_methods)}"
    reasons = {
        "bitsandbytes4": f"4-bit quantization at load time is gone from vLLM; {_PREQUANTIZED}",
        "squeezellm": f"vLLM no longer reads squeezellm; re-quantize the model: {_PREQUANTIZED}",
        "smoothquant": _W8A8,
        "static_int8": _W8A8,
        "gguf": f"vLLM no longer reads gguf; {known}",
        "marlin": f"leave it out, vLLM picks Marlin kernels by itself; {known}",
    }
    draft.fail(f"{setting.label}: {text} is not possible: {reasons.get(method, known)}", setting)
    return None


def lora(draft: ArgumentDraft) -> None:
    """Set ranks that vLLM has; check that the slots fit each other."""
    model = draft.settings.model
    rank, said = model.max_lora_rank, model.details
    if rank is not None:
        allowed = [c for c in load_release().engine["max_lora_rank"].choices if isinstance(c, int)]
        rounded = next((size for size in sorted(allowed) if size >= rank), None)
        written = said.max_lora_rank
        if rounded is None:
            draft.fail(f"{written.stated} is above {max(allowed)}, the most vLLM has", written)
        else:
            if rounded != rank:
                draft.warn(f"{written.stated} is rounded up to {rounded}, which vLLM has", written)
            draft.put("max_lora_rank", rounded, written.origin)
    if model.max_cpu_loras is not None and model.max_cpu_loras < model.max_loras:
        draft.fail(
            f"{said.max_cpu_loras.stated} must be at least max_loras={model.max_loras} "
            f"({said.max_loras.origin})",
            said.max_cpu_loras,
        )
    _warn_of_missing_folder(draft)
    if draft.values.get("default_mm_loras"):
        draft.fail(
            f"option.{draft.label('default_mm_loras')} is not supported: vLLM would choose an "
            "adapter by the words in a message, and those are no names here; put each adapter in "
            "the folder adapters/ of the model, or register it, and name it in the requests"
        )


def _warn_of_missing_folder(draft: ArgumentDraft) -> None:
    """Warn of a folder of adapters that was named and is not there."""
    model = draft.settings.model
    said, place = model.details.adapters, Path(without_file_scheme(model.adapters))
    root = draft.model.directory if draft.model is not None else None
    is_known = place.is_absolute() or root is not None
    is_missing = is_known and not (root or Path()).joinpath(place).is_dir()
    if said.is_set and model.enable_lora and is_missing:
        draft.warn(f"{said.stated} is no folder: no adapter is registered from it", said)
    if root is None or model.enable_lora or is_missing:
        return
    if any(folder.is_dir() for folder in root.joinpath(place).iterdir()):
        draft.warn(f"the adapters in {root / place} are not served: option.enable_lora is not true")


def adapter_format(draft: ArgumentDraft) -> None:
    """Adapters in fp32 need a CPU; the embedded model has what vLLM picks for the GPU.

    VLLM's kernels for GPUs refuse fp32 (0.32: lora/ops/triton_ops/lora_shrink_op.py).
    """
    values = draft.values
    is_fp32 = values.get("dtype") in ("float32", "float")
    if not (is_fp32 and values.get("enable_lora") and draft.devices.gpu_count):
        return
    if draft.model is not None and draft.model.model == str(DEMO_MODEL_DIR):
        draft.put("dtype", "auto", Origin(OriginKind.DERIVED, "a GPU has no fp32 for adapters"))
        return
    draft.fail(
        f"{draft.label('dtype')}: fp32 with enable_lora needs a CPU, since vLLM's LoRA kernels for "
        f"GPUs have fp16 and bf16 only; use option.dtype=bf16 or fp16, or leave enable_lora out"
    )


def parsers(draft: ArgumentDraft) -> None:
    """Check that tool and reasoning parsers are known if they are needed."""
    release, model = load_release(), draft.settings.model
    said = model.details
    if model.enable_auto_tool_choice and model.tool_parser_plugin is None:
        switch, tools = said.enable_auto_tool_choice, said.tool_call_parser
        _check_parser(draft, switch, tools, release.tool_parsers)
    has_parser = model.enable_reasoning or model.reasoning_parser is not None
    if has_parser and model.reasoning_parser_plugin is None:
        _check_parser(
            draft, said.enable_reasoning, said.reasoning_parser, release.reasoning_parsers
        )


def _check_parser(
    draft: ArgumentDraft, switch: Setting, parser: Setting, known: tuple[str, ...]
) -> None:
    """Fail where `switch` needs a parser and the one set is missing or unknown."""
    if not parser.is_set:
        draft.fail(
            f"{switch.label} needs option.{parser.name}; known are {', '.join(known)}", switch
        )
    elif parser.value not in known:
        recorded, installed = load_release().release, installed_release()
        names = f"known are {', '.join(known)}"
        if installed in (None, recorded):
            draft.fail(f"{parser.label}: parser {parser.value} is not known; {names}", parser)
        else:  # which may have more
            draft.warn(f"{parser.label}: parser {parser.value} is not among those of vLLM "
                       f"{recorded}, whose names are recorded; {installed} is installed. There, "
                       f"{names}", parser)  # fmt: skip


def remote_code(draft: ArgumentDraft) -> None:
    """Warn of code from the hub without a pinned revision."""
    settings, model = draft.settings.model, draft.model
    if not settings.trust_remote_code or model is None:
        return
    is_hub_id = "://" not in model.model and not is_directory(model.model)
    if is_hub_id and settings.revision is None:
        setting = settings.details.trust_remote_code
        draft.warn(
            f"{setting.label} runs code of {model.model} that may change at any time: set "
            f"option.revision to the commit you validated",
            setting,
        )


def entry_point(draft: ArgumentDraft) -> None:
    """Check that a local entry point exists."""
    file, model = draft.settings.model.entry_point, draft.model
    if file is None or model is None:
        return
    if file.startswith(("http://", "https://")) or draft.sources.is_store(model.reference):
        return
    path = (model.directory or Path("/nonexistent")) / file
    if not is_file(path):
        place = f"in {model.directory}" if model.directory else "(there is no model directory)"
        setting = draft.settings.model.details.entry_point
        draft.fail(f"{setting.label}: {file} does not exist {place}", setting)


def served_task(values: Mapping[str, object]) -> str:
    """The served task of an engine with these arguments: generate, embed or classify."""
    if values.get("convert") in ("embed", "classify"):
        return str(values["convert"])
    return "embed" if values.get("runner") == "pooling" else "generate"


_EAGER: Final = "enforce_eager"
# Arguments of those who choose by themselves how a model is compiled.
_CHOSEN: Final = ("compilation_config", "optimization_level")
_COST: Final = "the start is shorter, each token takes longer (docs/caches.md#compiled-code)"


def compile_if_possible(draft: ArgumentDraft) -> None:
    """Switch compilation off where it would fail, and refuse what asks for it."""
    lack, eager = draft.devices.missing_compiler, draft.values.get(_EAGER)
    if draft.devices.gpu_count or not lack or eager or draft.model is None:
        return
    if draft.engines.of(draft.architectures, draft.values) is not None:  # it compiles nothing
        return
    if eager is not None:
        draft.fail(f"{draft.label(_EAGER)} is false and needs {lack}, which this system lacks")
    elif not any(name in draft.values for name in _CHOSEN):
        draft.put(_EAGER, True, Origin(OriginKind.DERIVED, "no compiler"))
        draft.warn(
            f"this system lacks {lack}, with which vLLM compiles a model for the CPU: "
            f"{_EAGER}=true is used; {_COST}"
        )
