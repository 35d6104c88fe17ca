"""Which models run on the Transformers engine: encoder-decoder models for text, which vLLM lacks.

The choice is made by the architecture in the model's config.json, among those whose tokens were
compared with Transformers' (config/models.md). With `model_impl` set to one of vLLM's own
implementations, vLLM runs the model. Options that the engine does not support are refused here.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.messages import DEFAULT_ORIGIN, EngineArguments
from lmi_vllm.translate.draft import FREE_GPUS, ArgumentDraft

ARCHITECTURES: Final = frozenset(
    {
        "T5ForConditionalGeneration",  # Flan-T5 too
        "MT5ForConditionalGeneration",
        "UMT5ForConditionalGeneration",
        "BartForConditionalGeneration",
        "MBartForConditionalGeneration",
        "PegasusForConditionalGeneration",
        "BlenderbotForConditionalGeneration",
    }
)
_SUPPORTED: Final = frozenset(
    {
        "model", "tokenizer", "revision", "tokenizer_revision", "code_revision", "dtype",
        "trust_remote_code", "max_model_len", "max_num_seqs", "served_model_name", "seed",
        "max_logprobs", "generation_config", "override_generation_config", "model_impl",
    }
)  # fmt: skip
_IGNORED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_memory", "block_size",
             "cpu_offload_gb", "enable_prefix_caching", "enable_chunked_prefill",
             "max_num_batched_tokens", "disable_sliding_window", "limit_mm_per_prompt"),
            "has no paged cache to size or share",
        ),
        **dict.fromkeys(
            ("enforce_eager", "compilation_config", "cudagraph_capture_sizes",
             "max_cudagraph_capture_size", "attention_backend", "async_scheduling"),
            "always runs the model as PyTorch does",
        ),
        **dict.fromkeys(
            ("max_loras", "max_lora_rank", "max_cpu_loras", "fully_sharded_loras", "lora_dtype"),
            "has no LoRA adapters",
        ),
        **dict.fromkeys(
            ("disable_log_stats", "enable_log_requests", "otlp_traces_endpoint"),
            "counts and traces only what the server itself does",
        ),
    }
)  # fmt: skip
_REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "enable_lora": "has no LoRA adapters",
        "quantization": "runs the weights as they are stored",
        "speculative_config": "does not decode speculatively",
        "runner": "only generates",
        "convert": "only generates",
        "hf_overrides": "reads config.json as it is",
        "load_format": "reads safetensors and PyTorch files",
        "reasoning_parser": "has no parsers",
        "scheduling_policy": "serves in the order of arrival",
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes",
             "device_ids", "enable_expert_parallel", "distributed_executor_backend"),
            "runs on one device",
        ),
    }
)  # fmt: skip
# Values that leave the engine's behaviour as it is.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "scheduling_policy": ("fcfs",),
        "load_format": ("auto", "safetensors", "hf", "pt"),
        "tokenizer_mode": ("auto", "hf"),
        "runner": ("auto", "generate"),
        "convert": ("auto", "none"),
        **dict.fromkeys(
            ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            (1,),
        ),
    }
)


def runs_here(architectures: Sequence[str], arguments: Mapping[str, object]) -> str | None:
    """Return the architecture that the Transformers engine runs; None where vLLM runs the model."""
    if arguments.get("model_impl") not in (None, "auto", "transformers") or not architectures:
        return None
    own = architectures[0]
    return own if own in ARCHITECTURES and own not in load_release().architectures else None


def choose_engine(draft: ArgumentDraft) -> None:
    """Choose the Transformers engine; report settings that it does not support."""
    own = runs_here(draft.architectures, draft.values)
    if own is None:
        return
    _use_one_device(draft, own)
    arguments = EngineArguments(draft.values, draft.origins)
    for sentence in refusals(own, arguments, draft.settings):
        draft.fail(sentence)
    if draft.config.get("quantization_config") is not None:
        draft.fail(
            f"quantization_config in config.json: {own} runs on the Transformers engine, which "
            f"reads plain weights only"
        )
    for sentence in remarks(own, arguments, draft.settings):
        draft.warn(sentence)


def _use_one_device(draft: ArgumentDraft, own: str) -> None:
    """Read `max` devices, which is the default, as one: this engine uses no more."""
    if draft.origins.get("data_parallel_size") == FREE_GPUS:
        del draft.values["data_parallel_size"], draft.origins["data_parallel_size"]
    degree = draft.settings.model.details.tensor_parallel_degree
    if draft.values.get("tensor_parallel_size") in (None, 1):
        return
    if not degree.is_set:
        draft.put("tensor_parallel_size", 1, DEFAULT_ORIGIN)
    elif degree.value == "max":
        draft.warn(
            f"{degree.stated} means one device: {own} runs on the Transformers engine", degree
        )
        draft.put("tensor_parallel_size", 1, degree.origin)


def refusals(own: str, arguments: EngineArguments, settings: Settings) -> Iterator[str]:
    """Yield one error for each setting that this engine does not support."""
    why_here = f"{own} runs on the Transformers engine"
    for name, value in _set(arguments):
        if name not in _SUPPORTED and name not in _IGNORED:
            stated = f"{name}={value} ({arguments.origin_of(name)})"
            yield f"{stated}: {why_here}, which {_REFUSED.get(name, 'has no such argument')}"
    said = settings.model.details
    for setting in (said.enable_auto_tool_choice, said.tool_call_parser, said.enable_reasoning):
        if setting.is_set and setting.value not in (None, False):
            yield f"{setting.stated}: {why_here}, which has no parsers"
    processes = settings.server.details.lmi_frontend_processes
    if processes.value not in (None, 1):
        yield f"{processes.stated}: {why_here}, which lives in one process"


def remarks(own: str, arguments: EngineArguments, settings: Settings) -> Iterator[str]:
    """Yield one warning that names the engine, and one for each setting that it ignores."""
    yield (
        f"{own} is an encoder-decoder model, which vLLM {load_release().release} does not run: it "
        f"is served by the Transformers engine (no LoRA, no grammars, one device, less throughput)"
    )
    for name, value in _set(arguments):
        if name in _IGNORED:
            stated = f"{name}={value} ({arguments.origin_of(name)})"
            yield f"{stated} has no effect on the Transformers engine, which {_IGNORED[name]}"
    details = (
        settings.server_details()
    )  # by name: the feature that owns the variable may be missing
    cache = next((setting for setting in details if setting.name == "LMI_CACHE_URI"), None)
    if cache is not None and cache.value:
        yield "LMI_CACHE_URI has no effect on the Transformers engine, which compiles nothing"


def _set(arguments: EngineArguments) -> Iterator[tuple[str, object]]:
    """Yield name and value of each argument that was set, other than to a neutral value."""
    for name, value in arguments.values.items():
        is_default = arguments.origin_of(name) in (DEFAULT_ORIGIN, FREE_GPUS)
        is_nothing = value is None or value is False or value in _NEUTRAL.get(name, ())
        if not is_default and not is_nothing:
            yield name, value
