"""The variables of NVIDIA's NIM for language models, and what says the same here (data).

They are not read: a NIM's model comes from its own registry, and its engine from a profile.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NIM_PREFIX: Final = "NIM_"
_FLAGS: Final = "give these flags of vllm serve to lmi-vllm serve"
_MODEL: Final = "set HF_MODEL_ID to the id on the hub, without hf://, or to a folder"
_MEMORY: Final = "set OPTION_GPU_MEMORY_UTILIZATION"
_PORT: Final = "set SERVING_INFERENCE_ADDRESS=http://0.0.0.0:PORT"
_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NIM_MODEL_PATH": _MODEL,
        "NIM_MODEL_NAME": _MODEL,
        "NIM_SERVED_MODEL_NAME": "set OPTION_SERVED_MODEL_NAME",
        "NIM_MAX_MODEL_LEN": "set OPTION_MAX_MODEL_LEN",
        "NIM_MAX_NUM_SEQS": "set OPTION_MAX_ROLLING_BATCH_SIZE",
        "NIM_TENSOR_PARALLEL_SIZE": "set OPTION_TENSOR_PARALLEL_DEGREE",
        "NIM_PIPELINE_PARALLEL_SIZE": "set OPTION_PIPELINE_PARALLEL_DEGREE",
        "NIM_KVCACHE_PERCENT": _MEMORY,
        "NIM_KV_CACHE_PERCENT": _MEMORY,
        "NIM_GPU_MEM_FRACTION": _MEMORY,
        "NIM_GPU_MEMORY_UTILIZATION": _MEMORY,
        "NIM_ENABLE_KV_CACHE_REUSE": "set OPTION_ENABLE_PREFIX_CACHING",
        "NIM_FORCE_TRUST_REMOTE_CODE": "set OPTION_TRUST_REMOTE_CODE",
        "NIM_GUIDED_DECODING_BACKEND": "set OPTION_GUIDED_DECODING_BACKEND",
        "NIM_PEFT_SOURCE": "set OPTION_ADAPTER_STORE and OPTION_ENABLE_LORA=true",
        "NIM_MAX_GPU_LORAS": "set OPTION_MAX_LORAS",
        "NIM_MAX_CPU_LORAS": "set OPTION_MAX_CPU_LORAS",
        "NIM_MAX_LORA_RANK": "set OPTION_MAX_LORA_RANK",
        "NIM_PASSTHROUGH_ARGS": _FLAGS,
        "NIM_SPECDEC_ARGS": _FLAGS,
        "NIM_SERVER_PORT": _PORT,
        "NIM_HTTP_API_PORT": _PORT,
    }
)


def advice_for(name: str) -> str:
    """Return why a variable of NIM has no effect, and what to set instead."""
    known = _ADVICE.get(name)
    return "it is for NVIDIA's NIM" + (f"; {known}" if known else ", and has no counterpart here")
