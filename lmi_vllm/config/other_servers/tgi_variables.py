"""The variables of text-generation-launcher 3 and what each one is here (data).

Names from the launcher's own arguments (text-generation-inference, launcher/src/main.rs), each of
which is also an environment variable, and from its SageMaker entry script.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.other_servers.replacement import (
    Converter,
    Replacement,
    not_needed,
    refused,
    same_in_variable,
    same_value,
    variable,
)
from lmi_vllm.config.parsers import boolean

_ROPE: Final = ("ROPE_SCALING", "ROPE_FACTOR")
# Converted together: two make one address, two one override.
TGI_PAIRS: Final = ("HOSTNAME", "PORT", *_ROPE)
_ALL_ADDRESSES: Final = "0.0.0.0"


def _sharded(text: str) -> Replacement:
    """Convert to tensor parallelism over all GPUs, or one."""
    return Replacement("option.tensor_parallel_degree", "max" if boolean(text) else "1")


def _quantize(text: str) -> Replacement:
    """Convert a quantization method; those that vLLM selects by itself need no option."""
    key, method = "option.quantize", text.lower()
    if method in ("awq", "gptq", "fp8", "compressed-tensors"):
        return Replacement(key, method)
    if method in ("bitsandbytes", "eetq"):
        why = f"vLLM has no {method}; fp8 is its 8-bit method at load for every layer, on GPUs"
        return Replacement(key, "fp8", why)
    if method == "marlin":
        return Replacement(None, why="vLLM chooses Marlin kernels by itself for AWQ, GPTQ and FP8")
    advice = "use a checkpoint quantized ahead of time (awq, gptq), or option.quantize=fp8"
    return Replacement(None, why=f"vLLM has no {method}; {advice}", is_refused=True)


def _speculate(text: str) -> Replacement:
    """Convert the number of n-gram speculative tokens."""
    config = f'{{"method": "ngram", "num_speculative_tokens": {int(text)}, "prompt_lookup_max": 4}}'
    why = "n-gram speculation; Medusa heads of a checkpoint need their own speculative_config"
    return Replacement("option.speculative_config", config, why)


def _kv_cache_dtype(text: str) -> Replacement:
    """Convert the name of an FP8 type of the KV cache."""
    return Replacement("option.kv_cache_dtype", text.lower().replace("e4m3fn", "e4m3"))


def pair_replacements(environ: Mapping[str, str]) -> Iterator[tuple[str, Replacement]]:
    """Yield what HOSTNAME and PORT, and the two ROPE variables, are together, with their source."""
    host = environ.get("HOSTNAME") or _ALL_ADDRESSES
    if not re.fullmatch(r"[0-9.:]+|localhost", host):  # Docker sets the container's name
        host = _ALL_ADDRESSES
    if port := environ.get("PORT"):
        yield f"PORT={port}", variable("SERVING_INFERENCE_ADDRESS", f"http://{host}:{port}")
    given = {name: environ[name] for name in _ROPE if environ.get(name)}
    if not given:
        return
    source = ", ".join(f"{name}={text}" for name, text in given.items())
    kind, factor = given.get("ROPE_SCALING", "linear"), given.get("ROPE_FACTOR", "1.0")
    try:
        override = {"rope_scaling": {"rope_type": kind, "factor": float(factor)}}
    except ValueError:
        yield source, Replacement(None, why=f"{factor!r} is no number", is_refused=True)
        return
    why = "vLLM checks rope settings against the model's own"
    yield source, Replacement("option.hf_overrides", json.dumps(override), why)


def _cuda_graphs(text: str) -> Replacement:
    """Convert the batch sizes of CUDA graphs; 0 is none."""
    if text.strip() == "0":
        return Replacement("option.enforce_eager", "true")
    return Replacement("option.cudagraph_capture_sizes", text)


def _attention(text: str) -> Replacement:
    """Convert the attention kernel, where vLLM has one of that name."""
    if text.lower() == "flashinfer":
        return Replacement("option.attention_backend", "FLASHINFER")
    return Replacement(None, why="vLLM chooses its attention kernel by itself")


def _tokenizer_config(text: str) -> Replacement:
    """Refuse a tokenizer configuration elsewhere: only its chat template can be used."""
    why = f"put the chat_template of {text} into a file and name it in option.chat_template"
    return Replacement(None, why=why, is_refused=True)


def _lora(text: str) -> Replacement:
    """Convert the list of adapters; an id alone is the adapter's name, as with TGI."""
    given = [item.strip() for item in text.split(",")]
    if not any("@" in item and "=" not in item for item in given):
        named = (item if "=" in item else f"{item}={item}" for item in given if item)
        return Replacement("option.lora_modules", ",".join(named))
    why = (
        f"a revision of an adapter cannot be chosen here ({text}): put its files below adapters/ "
        f"of the model directory"
    )
    return Replacement("option.enable_lora", "true", why)


_SCHEDULER: Final = not_needed(
    "vLLM schedules prefill and decode in one step; nothing to tune here"
)

TGI_VARIABLES: Final[Mapping[str, Converter]] = MappingProxyType(
    {
        "MODEL_ID": same_value("option.model_id"),
        "HF_MODEL_ID": same_value("option.model_id"),
        "REVISION": same_value("option.revision"),
        "HF_MODEL_REVISION": same_value("option.revision"),
        "VALIDATION_WORKERS": not_needed("tokenization runs inside the server"),
        "SHARDED": _sharded,
        "NUM_SHARD": same_value("option.tensor_parallel_degree"),
        "SM_NUM_GPUS": same_value("option.tensor_parallel_degree"),
        "QUANTIZE": _quantize,
        "HF_MODEL_QUANTIZE": _quantize,
        "SPECULATE": _speculate,
        "DTYPE": same_value("option.dtype"),
        "KV_CACHE_DTYPE": _kv_cache_dtype,
        "TRUST_REMOTE_CODE": same_value("option.trust_remote_code"),
        "HF_MODEL_TRUST_REMOTE_CODE": same_value("option.trust_remote_code"),
        "MAX_CONCURRENT_REQUESTS": same_value("job_queue_size"),
        "MAX_BEST_OF": same_in_variable("LMI_MAX_SEQUENCES"),
        "MAX_STOP_SEQUENCES": same_in_variable("LMI_MAX_STOP_STRINGS"),
        "MAX_TOP_N_TOKENS": same_value(
            "option.max_logprobs", "also bounds the OpenAI routes' logprobs"
        ),
        "MAX_INPUT_TOKENS": not_needed(
            "only prompt plus answer is bounded, by option.max_model_len"
        ),
        "MAX_INPUT_LENGTH": not_needed(
            "only prompt plus answer is bounded, by option.max_model_len"
        ),
        "MAX_TOTAL_TOKENS": same_value("option.max_model_len"),
        "WAITING_SERVED_RATIO": _SCHEDULER,
        "MAX_BATCH_PREFILL_TOKENS": same_value("option.max_rolling_batch_prefill_tokens"),
        "MAX_BATCH_TOTAL_TOKENS": not_needed(
            "vLLM sizes its KV cache from option.gpu_memory_utilization"
        ),
        "MAX_WAITING_TOKENS": _SCHEDULER,
        "MAX_BATCH_SIZE": same_value("option.max_rolling_batch_size"),
        "CUDA_GRAPHS": _cuda_graphs,
        "PROMETHEUS_PORT": not_needed("metrics are at /metrics of the same port"),
        "SHARD_UDS_PATH": not_needed("there is no launcher and no router"),
        "MASTER_ADDR": not_needed("one process on one node needs none"),
        "MASTER_PORT": not_needed("one process on one node needs none"),
        "HUGGINGFACE_HUB_CACHE": same_in_variable("HF_HUB_CACHE"),
        "WEIGHTS_CACHE_OVERRIDE": same_in_variable("HF_HUB_CACHE"),
        "DISABLE_CUSTOM_KERNELS": not_needed("vLLM chooses kernels that the GPU has"),
        "CUDA_MEMORY_FRACTION": same_value("option.gpu_memory_utilization"),
        "JSON_OUTPUT": not_needed("logs are plain lines"),
        "OTLP_ENDPOINT": same_in_variable("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "OTLP_SERVICE_NAME": same_in_variable("OTEL_SERVICE_NAME"),
        "CORS_ALLOW_ORIGIN": same_in_variable("SERVING_CORS_ALLOWED_ORIGIN"),
        "API_KEY": same_in_variable("LMI_API_KEY"),
        "WATERMARK_GAMMA": refused(
            "TGI's watermark does not exist here; see vLLM's watermark_config"
        ),
        "WATERMARK_DELTA": refused(
            "TGI's watermark does not exist here; see vLLM's watermark_config"
        ),
        "NGROK": refused("run ngrok beside the server"),
        "NGROK_AUTHTOKEN": refused("run ngrok beside the server"),
        "NGROK_EDGE": refused("run ngrok beside the server"),
        "TOKENIZER_CONFIG_PATH": _tokenizer_config,
        "DISABLE_GRAMMAR_SUPPORT": not_needed(
            "structured output costs nothing until it is asked for"
        ),
        "MAX_CLIENT_BATCH_SIZE": not_needed("max_request_size bounds a request"),
        "LORA_ADAPTERS": _lora,
        "USAGE_STATS": not_needed("there are no usage statistics"),
        "PAYLOAD_LIMIT": same_in_variable("SERVING_MAX_REQUEST_SIZE"),
        "ENABLE_PREFILL_LOGPROBS": not_needed("decoder_input_details in the request is enough"),
        "GRACEFUL_TERMINATION_TIMEOUT": same_in_variable("SERVING_SHUTDOWN_TIMEOUT"),
        "ATTENTION": _attention,
        "PREFIX_CACHING": same_value("option.enable_prefix_caching"),
        "USE_PREFIX_CACHING": same_value("option.enable_prefix_caching"),
        "PREFILL_CHUNKING": same_value("option.enable_chunked_prefill"),
        "MESSAGES_API_ENABLED": not_needed("/v1/chat/completions and messages are always there"),
    }
)

# No other server uses these names, so one of them identifies an environment of TGI.
TGI_ONLY_NAMES: Final = (
    "MODEL_ID", "NUM_SHARD", "MAX_INPUT_TOKENS", "MAX_INPUT_LENGTH", "MAX_TOTAL_TOKENS",
    "MAX_BATCH_TOTAL_TOKENS", "WAITING_SERVED_RATIO", "QUANTIZE", "HF_MODEL_REVISION",
)  # fmt: skip

LAUNCHED: Final = "TEXT_GENERATION_LAUNCHER"  # set by our images, whose command was TGI's
LAUNCHER: Final = "text-generation-launcher"
_SHORT: Final = MappingProxyType({"-p": "PORT", "-e": "ENV"})


def variables_of(flags: Sequence[str]) -> dict[str, str]:
    """Return TGI's variables; a flag without a value is `true`."""
    found: dict[str, str] = {}
    name = ""
    for word in flags:
        if word == LAUNCHER:
            continue
        if word.startswith("--") or word in _SHORT:
            flag, has_value, value = word.removeprefix("--").partition("=")
            name = _SHORT.get(word) or flag.upper().replace("-", "_")
            found[name] = value if has_value else "true"
            name = "" if has_value else name
        elif name:
            found[name], name = word, ""
        else:
            found[word] = ""  # no flag before it
    return found


def unknown_flags(variables: Sequence[str]) -> list[str]:
    """Return those of these names that the launcher does not have, as they are written."""
    unknown = [name for name in variables if name not in (*TGI_VARIABLES, *TGI_PAIRS)]
    return [f"--{name.lower().replace('_', '-')}" for name in unknown]
