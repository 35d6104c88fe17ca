"""Options whose engine arguments follow by a rule of their own."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lmi_vllm.checks.model import EIGHT_BITS
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.setting import Setting
from lmi_vllm.config.value_rules import EMBEDDING_ENGINES
from lmi_vllm.config.vllm_schema import installed_release, load_release
from lmi_vllm.origin import DEFAULT_ORIGIN
from lmi_vllm.sources.local import is_directory, is_file, without_file_scheme
from lmi_vllm.sources.table import is_store
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
    setting = draft.given("load_format")
    if setting is None:
        return
    if setting.value == "sagemaker_fast_model_loader":
        draft.fail(
            f"{setting.label}: sagemaker_fast_model_loader is not available here; use "
            f"runai_streamer, sharded_state or leave it out"
        )
        return
    draft.put("load_format", setting.value, setting.origin)


def model_dir(draft: ArgumentDraft) -> None:
    """Name a directory of weights that something else takes the place of."""
    setting, model = draft.given("model_dir"), draft.model
    if setting is None or model is None or not isinstance(setting.value, str):
        return
    if str(Path(without_file_scheme(setting.value))) != model.reference:
        named = draft.given("model_id")
        other = model.reference if named is None else named.stated
        draft.warn(f"{setting.label} has no effect: the model is {mask_urls(other)}")


def tokenizer_mode(draft: ArgumentDraft) -> None:
    """VLLM has no slow tokenizers any more."""
    setting = draft.given("tokenizer_mode")
    if setting is None:
        return
    if setting.value == "slow":
        draft.warn(f"{setting.label}: slow is gone from vLLM; auto is used")
    value = "auto" if setting.value == "slow" else setting.value
    draft.put("tokenizer_mode", value, setting.origin)


def task(draft: ArgumentDraft) -> None:
    """Runner and convert of the task; explicit ones win."""
    setting = draft.settings.model.details["task"]
    text = str(setting.value).replace("_", "-")
    if setting.is_set and text not in _TASKS:
        draft.warn(
            f"{setting.label}: task {setting.value} is not known and counts as auto; known are "
            f"{', '.join(_TASKS)}"
        )
    runner, convert = _TASKS.get(text, ("auto", "auto"))
    if not setting.is_set and draft.settings.server.engine in EMBEDDING_ENGINES:
        runner = "pooling"
    for argument, value in (("runner", runner), ("convert", convert)):
        explicit = draft.values.get(argument, value)
        if setting.is_set and explicit != value:
            draft.warn(
                f"{draft.label(argument)}={explicit} is used; {setting.stated} "
                f"would mean {argument}={value}"
            )
        draft.put_if_unset(argument, value, setting.origin)


def batch_sizes(draft: ArgumentDraft) -> None:
    """Warn of sizes of LMI's batches; those of its other engines go with the engine."""
    if draft.settings.server.engine in EMBEDDING_ENGINES:
        return
    for name in ("batch_size", "max_dynamic_batch_size"):
        setting = draft.settings.server.given(name)
        if setting is not None and setting.value != "1":
            draft.warn(f"{setting.label} has no effect: continuous batching is always on")


def quantization(draft: ArgumentDraft) -> None:
    """The quantization method out of `quantize`, `load_in_8bit` and `load_in_4bit`."""
    chosen = draft.given("quantize")
    result = None if chosen is None else _quantization_method(draft, chosen, str(chosen.value))
    origin = DEFAULT_ORIGIN if chosen is None else chosen.origin
    for flag, stands_for in (("load_in_8bit", "bitsandbytes8"), ("load_in_4bit", "bitsandbytes4")):
        setting = draft.given(flag)
        if setting is None or setting.value is not True:
            continue
        method = _quantization_method(draft, setting, stands_for)
        if chosen is not None and method != result:
            draft.fail(
                f"{setting.stated} and {chosen.stated} ask for different "
                f"quantization: set one of them"
            )
        elif chosen is None:
            result, origin = method, setting.origin
    draft.put("quantization", result, origin)
    if result in load_release().deprecated_quantization_methods:
        draft.put_if_unset("allow_deprecated_quantization", True, origin)


def _quantization_method(draft: ArgumentDraft, setting: Setting, text: str) -> str | None:
    """VLLM's name for quantization `text`; what is not possible is said."""
    release = load_release()
    method = text.lower()
    if method in release.quantization_methods:
        return method
    if method in ("bitsandbytes", "bitsandbytes8", "dynamic_int8"):
        if method != "dynamic_int8" and "bitsandbytes" in release.quantization_methods:
            return "bitsandbytes"
        draft.warn(
            f"{setting.label}: vLLM has no {method} any more; {EIGHT_BITS} is used, which "
            f"quantizes the experts of a mixture only; a model without experts is refused "
            f"(option.quantize=fp8 quantizes every layer)"
        )
        return EIGHT_BITS
    known = f"allowed are {', '.join(release.quantization_methods)}"
    reasons = {
        "bitsandbytes4": f"4-bit quantization at load time is gone from vLLM; {_PREQUANTIZED}",
        "squeezellm": f"vLLM no longer reads squeezellm; re-quantize the model: {_PREQUANTIZED}",
        "smoothquant": _W8A8,
        "static_int8": _W8A8,
        "gguf": f"vLLM no longer reads gguf; {known}",
        "marlin": f"leave it out, vLLM picks Marlin kernels by itself; {known}",
    }
    draft.fail(f"{setting.label}: {text} is not possible: {reasons.get(method, known)}")
    return None


def lora(draft: ArgumentDraft) -> None:
    """Ranks vLLM has, and slots that fit each other."""
    rank = draft.given("max_lora_rank")
    if rank is not None and isinstance(rank.value, int):
        allowed = [c for c in load_release().engine["max_lora_rank"].choices if isinstance(c, int)]
        rounded = next((size for size in sorted(allowed) if size >= rank.value), None)
        if rounded is None:
            draft.fail(f"{rank.stated} is above {max(allowed)}, the most vLLM has")
        else:
            if rounded != rank.value:
                draft.warn(f"{rank.stated} is rounded up to {rounded}, which vLLM has")
            draft.put("max_lora_rank", rounded, rank.origin)
    cpu, slots = draft.given("max_cpu_loras"), draft.settings.model.detail("max_loras")
    if cpu is None or slots is None:
        return
    if isinstance(cpu.value, int) and isinstance(slots.value, int) and cpu.value < slots.value:
        draft.fail(f"{cpu.stated} must be at least max_loras={slots.value} ({slots.origin})")


def parsers(draft: ArgumentDraft) -> None:
    """Tool and reasoning parsers must be known where they are asked for."""
    release = load_release()
    choice, tool = draft.given("enable_auto_tool_choice"), draft.given("tool_call_parser")
    if choice is not None and choice.value is True and draft.given("tool_parser_plugin") is None:
        _check_parser(draft, choice, tool, "tool_call_parser", release.tool_parsers)
    switch, reasoning = draft.given("enable_reasoning"), draft.given("reasoning_parser")
    if draft.given("reasoning_parser_plugin") is not None:
        return
    if switch is not None and switch.value is True:
        _check_parser(draft, switch, reasoning, "reasoning_parser", release.reasoning_parsers)
    elif reasoning is not None:
        _check_parser(draft, reasoning, reasoning, "reasoning_parser", release.reasoning_parsers)


def _check_parser(
    draft: ArgumentDraft,
    switch: Setting,
    parser: Setting | None,
    name: str,
    known: tuple[str, ...],
) -> None:
    """Fail where `switch` needs a parser and the one set is missing or unknown."""
    if parser is None:
        draft.fail(f"{switch.label} needs option.{name}; known are {', '.join(known)}")
    elif parser.value not in known:
        recorded, installed = load_release().release, installed_release()
        names = f"known are {', '.join(known)}"
        if installed in (None, recorded):
            draft.fail(f"{parser.label}: parser {parser.value} is not known; {names}")
        else:  # which may have more
            draft.warn(f"{parser.label}: parser {parser.value} is not among those of vLLM "
                       f"{recorded}, whose names are recorded; {installed} is installed. There, "
                       f"{names}")  # fmt: skip


def remote_code(draft: ArgumentDraft) -> None:
    """Code from the hub should be pinned to what was looked at."""
    trust, model = draft.given("trust_remote_code"), draft.model
    if trust is None or trust.value is not True or model is None:
        return
    is_hub_id = "://" not in model.model and not is_directory(model.model)
    if is_hub_id and draft.given("revision") is None:
        draft.warn(
            f"{trust.label} runs code of {model.model} that may change at any time: set "
            f"option.revision to the commit you validated"
        )


def entry_point(draft: ArgumentDraft) -> None:
    """A local entry point must exist."""
    setting, model = draft.given("entryPoint"), draft.model
    if setting is None or not isinstance(setting.value, str) or model is None:
        return
    if setting.value.startswith(("http://", "https://")) or is_store(model.reference):
        return
    path = (model.directory or Path("/nonexistent")) / setting.value
    if not is_file(path):
        place = f"in {model.directory}" if model.directory else "(there is no model directory)"
        draft.fail(f"{setting.label}: {setting.value} does not exist {place}")


def served_task(values: Mapping[str, object]) -> str:
    """What an engine with these arguments is served as: generate, embed or classify."""
    if values.get("convert") in ("embed", "classify"):
        return str(values["convert"])
    return "embed" if values.get("runner") == "pooling" else "generate"
