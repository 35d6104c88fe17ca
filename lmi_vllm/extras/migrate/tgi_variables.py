"""The variables of text-generation-launcher 3 and what each one is here (data for `migrate`).

Names from the launcher's own arguments (text-generation-inference, launcher/src/main.rs), each of
which is also an environment variable, and from its SageMaker entry script.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lmi_vllm.config.parsers import boolean


@dataclass(frozen=True, slots=True)
class Carried:
    """What a value becomes: `key` None means there is nothing to set."""

    key: str | None
    text: str = ""
    why: str = ""  # set where it is only an approximation, or where it is refused
    is_refused: bool = False


Carry = Callable[[str], Carried]


def to(key: str, why: str = "") -> Carry:
    """The same text under `key`."""
    return lambda text: Carried(key, text, why)


def nothing(why: str) -> Carry:
    """No equivalent, and none is needed."""
    return lambda text: Carried(None, why=why)


def refused(why: str) -> Carry:
    """No equivalent; the user has to decide."""
    return lambda text: Carried(None, why=why, is_refused=True)


def _sharded(text: str) -> Carried:
    """Shards over all GPUs, or one."""
    return Carried("option.tensor_parallel_degree", "max" if boolean(text) else "1")


def _quantize(text: str) -> Carried:
    """TGI's methods; those vLLM reads from the checkpoint need no option."""
    key, method = "option.quantize", text.lower()
    if method in ("awq", "gptq", "fp8", "compressed-tensors"):
        return Carried(key, method)
    if method in ("bitsandbytes", "eetq"):
        why = f"vLLM has no {method}; fp8 is its 8-bit method at load for every layer, on GPUs"
        return Carried(key, "fp8", why)
    if method == "marlin":
        return Carried(None, why="vLLM chooses Marlin kernels by itself for AWQ, GPTQ and FP8")
    advice = "use a checkpoint quantized ahead of time (awq, gptq), or option.quantize=fp8"
    return Carried(None, why=f"vLLM has no {method}; {advice}", is_refused=True)


def _speculate(text: str) -> Carried:
    """TGI's n-gram speculation."""
    config = f'{{"method": "ngram", "num_speculative_tokens": {int(text)}, "prompt_lookup_max": 4}}'
    why = "n-gram speculation; Medusa heads of a checkpoint need their own speculative_config"
    return Carried("option.speculative_config", config, why)


def _kv_cache_dtype(text: str) -> Carried:
    """FP8 variants of the KV cache."""
    return Carried("option.kv_cache_dtype", text.lower().replace("e4m3fn", "e4m3"))


def _cuda_graphs(text: str) -> Carried:
    """Batch sizes to capture, 0 for none."""
    if text.strip() == "0":
        return Carried("option.enforce_eager", "true")
    return Carried("option.cudagraph_capture_sizes", text)


def _attention(text: str) -> Carried:
    """The attention kernel, where vLLM has one of that name."""
    if text.lower() == "flashinfer":
        return Carried("option.attention_backend", "FLASHINFER")
    return Carried(None, why="vLLM chooses its attention kernel by itself")


def _tokenizer_config(text: str) -> Carried:
    """A tokenizer configuration elsewhere: only its chat template matters."""
    why = f"put the chat_template of {text} into a file and name it in option.chat_template"
    return Carried(None, why=why, is_refused=True)


def _lora(text: str) -> Carried:
    """Adapters are registered, not listed."""
    why = (
        f"put the adapters ({text}) below adapters/ of the model directory, or register them with "
        f"POST /models/<model>/adapters; hub ids need LMI_ADAPTER_HUB=true"
    )
    return Carried("option.enable_lora", "true", why)


_SCHEDULER: Final = nothing("vLLM schedules prefill and decode in one step; nothing to tune here")

TGI_VARIABLES: Final[Mapping[str, Carry]] = MappingProxyType(
    {
        "MODEL_ID": to("option.model_id"),
        "HF_MODEL_ID": to("option.model_id"),
        "REVISION": to("option.revision"),
        "HF_MODEL_REVISION": to("option.revision"),
        "VALIDATION_WORKERS": nothing("tokenization runs inside the server"),
        "SHARDED": _sharded,
        "NUM_SHARD": to("option.tensor_parallel_degree"),
        "SM_NUM_GPUS": to("option.tensor_parallel_degree"),
        "QUANTIZE": _quantize,
        "HF_MODEL_QUANTIZE": _quantize,
        "SPECULATE": _speculate,
        "DTYPE": to("option.dtype"),
        "KV_CACHE_DTYPE": _kv_cache_dtype,
        "TRUST_REMOTE_CODE": to("option.trust_remote_code"),
        "HF_MODEL_TRUST_REMOTE_CODE": to("option.trust_remote_code"),
        "MAX_CONCURRENT_REQUESTS": to("job_queue_size"),
        "MAX_BEST_OF": to("LMI_MAX_SEQUENCES"),
        "MAX_STOP_SEQUENCES": to("LMI_MAX_STOP_STRINGS"),
        "MAX_TOP_N_TOKENS": to("option.max_logprobs", "also bounds the OpenAI routes' logprobs"),
        "MAX_INPUT_TOKENS": nothing("only prompt plus answer is bounded, by option.max_model_len"),
        "MAX_INPUT_LENGTH": nothing("only prompt plus answer is bounded, by option.max_model_len"),
        "MAX_TOTAL_TOKENS": to("option.max_model_len"),
        "WAITING_SERVED_RATIO": _SCHEDULER,
        "MAX_BATCH_PREFILL_TOKENS": to("option.max_rolling_batch_prefill_tokens"),
        "MAX_BATCH_TOTAL_TOKENS": nothing(
            "vLLM sizes its KV cache from option.gpu_memory_utilization"
        ),
        "MAX_WAITING_TOKENS": _SCHEDULER,
        "MAX_BATCH_SIZE": to("option.max_rolling_batch_size"),
        "CUDA_GRAPHS": _cuda_graphs,
        "PROMETHEUS_PORT": nothing("metrics are at /metrics of the same port"),
        "SHARD_UDS_PATH": nothing("there is no launcher and no router"),
        "MASTER_ADDR": nothing("one process on one node needs none"),
        "MASTER_PORT": nothing("one process on one node needs none"),
        "HUGGINGFACE_HUB_CACHE": to("HF_HUB_CACHE"),
        "WEIGHTS_CACHE_OVERRIDE": to("HF_HUB_CACHE"),
        "DISABLE_CUSTOM_KERNELS": nothing("vLLM chooses kernels that the GPU has"),
        "CUDA_MEMORY_FRACTION": to("option.gpu_memory_utilization"),
        "JSON_OUTPUT": nothing("logs are plain lines"),
        "OTLP_ENDPOINT": to("OTEL_EXPORTER_OTLP_ENDPOINT"),
        "OTLP_SERVICE_NAME": to("OTEL_SERVICE_NAME"),
        "CORS_ALLOW_ORIGIN": to("SERVING_CORS_ALLOWED_ORIGIN"),
        "API_KEY": to("LMI_API_KEY"),
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
        "DISABLE_GRAMMAR_SUPPORT": nothing("structured output costs nothing until it is asked for"),
        "MAX_CLIENT_BATCH_SIZE": nothing("max_request_size bounds a request"),
        "LORA_ADAPTERS": _lora,
        "USAGE_STATS": nothing("there are no usage statistics"),
        "PAYLOAD_LIMIT": to("SERVING_MAX_REQUEST_SIZE"),
        "ENABLE_PREFILL_LOGPROBS": nothing("decoder_input_details in the request is enough"),
        "GRACEFUL_TERMINATION_TIMEOUT": to("SERVING_SHUTDOWN_TIMEOUT"),
        "ATTENTION": _attention,
        "PREFIX_CACHING": to("option.enable_prefix_caching"),
        "USE_PREFIX_CACHING": to("option.enable_prefix_caching"),
        "PREFILL_CHUNKING": to("option.enable_chunked_prefill"),
        "MESSAGES_API_ENABLED": nothing("/v1/chat/completions and messages are always there"),
    }
)

# Read together with others: HOSTNAME and PORT make one address, the two ROPE ones one override.
TGI_PAIRS: Final = ("HOSTNAME", "PORT", "ROPE_SCALING", "ROPE_FACTOR")
# No other server uses these names, so one of them says that an environment is TGI's.
TGI_MARKS: Final = (
    "MODEL_ID", "NUM_SHARD", "MAX_INPUT_TOKENS", "MAX_INPUT_LENGTH", "MAX_TOTAL_TOKENS",
    "MAX_BATCH_TOTAL_TOKENS", "WAITING_SERVED_RATIO", "QUANTIZE", "HF_MODEL_REVISION",
)  # fmt: skip
