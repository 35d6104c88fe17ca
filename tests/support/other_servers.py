"""How charts, operators and images start vLLM, TGI or AWS's images: their own words and variables.

Each row is the command and the environment that the named place sets, with its placeholders filled.
Two things differ from it: the model is a folder of the test, and flags that a CPU cannot serve are
left out (`test_vllm_flags` has every flag). `{model}` is that folder, `{adapter}` an adapter of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from lmi_vllm.cli import parse
from lmi_vllm.commands.explain import command_line_of
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.features.image.__main__ import as_verb
from tests.support.assembled import CONFIGURATION, OPTIONS

NAMED: Final = ("assistant",)
FOLDER: Final = ("{model}",)


@dataclass(frozen=True)
class Deployment:
    """A row: what is started, and what `explain` and the server say then."""

    place: str  # who starts it, and in which file
    words: tuple[str, ...]  # of the container; none for an image that is set by variables
    environ: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, object] = field(default_factory=dict)  # of `explain`: a name and its value
    models: tuple[str, ...] = FOLDER  # of /v1/models
    address: str = "http://0.0.0.0:8000"
    drain: float = 25.0  # seconds


_ADAPTER: Final = '{"name": "sql", "path": "{adapter}", "base_model_name": "assistant"}'

DEPLOYMENTS: Final = (
    Deployment(
        "kserve: config-llm-template.yaml",
        (
            "vllm", "serve", "{model}", "--served-model-name", "assistant", "--port", "8000",
            "--shutdown-timeout", "45", "--disable-uvicorn-access-log",
        ),
        {"HOME": "/home", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_CACHE": "/models"},
        {"served_model_name": ["assistant"], "shutdown_timeout": 45.0},
        NAMED,
        drain=45,
    ),
    Deployment(
        "kserve: the same with TLS, and adapters of spec.model.lora",
        (
            "vllm", "serve", "{model}", "--served-model-name", "assistant", "--port", "8000",
            "--enable-ssl-refresh", "--ssl-certfile", "{tls}/tls.crt", "--ssl-keyfile",
            "{tls}/tls.key", "--enable-lora", "--lora-modules", _ADAPTER,
        ),
        {"HOME": "/home"},
        {"lora_modules": {"sql": "{adapter}"}, "enable_lora": True},
        ("assistant", "sql"),
        "https://0.0.0.0:8000",
    ),
    Deployment(
        "kserve: the vLLM ServingRuntime of Open Data Hub",
        (
            "python", "-m", "vllm.entrypoints.openai.api_server", "--port=8080",
            "--model={model}", "--served-model-name=assistant",
        ),
        {"HF_HOME": "/tmp/hf_home"},
        {"served_model_name": ["assistant"]},
        NAMED,
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "production-stack: deployment-vllm-multi.yaml",
        (
            "vllm", "serve", "{model}", "--host", "0.0.0.0", "--port", "8000", "--enable-lora",
            "--no-enable-prefix-caching", "--max-model-len", "512", "--dtype", "float32",
            "--tensor-parallel-size", "1", "--max-num-seqs", "16", "--gpu_memory_utilization",
            "0.2", "--max_loras", "2",
        ),
        {
            "PYTHONHASHSEED": "123", "POD_IP": "10.0.0.7", "LMCACHE_LOG_LEVEL": "DEBUG",
            "LMCACHE_LMCACHE_INSTANCE_ID": "pod-1", "VLLM_API_KEY": "sk-secret-of-the-chart",
        },
        {
            "enable_prefix_caching": False, "max_model_len": 512, "max_num_seqs": 16,
            "gpu_memory_utilization": 0.2, "max_loras": 2, "VLLM_API_KEY": "***",
        },
    ),
    Deployment(
        "hyperpod: InferenceEndpointConfig, worker.args",
        ("{model}", "--max-model-len", "512", "--tensor-parallel-size", "1"),
        {"SERVING_PORT": "tcp://10.0.0.9:80"},  # what Kubernetes sets for a Service named serving
        {"max_model_len": 512},
        ("lmi",),
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "llm-d: optimized-baseline, patch-vllm.yaml",
        (
            "vllm", "serve", "{model}",
            "--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
            "--tensor-parallel-size=1",
        ),
        {"HF_TOKEN": "hf_of_llm_d", "OTEL_SERVICE_NAME": "vllm-decode"},
        {"HF_TOKEN": "***", "tensor_parallel_size": 1},
    ),
    Deployment(
        "llm-d: pd-disaggregation, patch-decode.yaml",
        (
            "vllm", "serve", "{model}", "--tensor-parallel-size=1", "--block-size=128",
            "--no-disable-hybrid-kv-cache-manager", "--port=8200", "--shutdown-timeout=60",
        ),
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7"},
        {"block_size": 128, "shutdown_timeout": 60.0},
        address="http://0.0.0.0:8200",
        drain=60,
    ),
    Deployment(
        "aws: sagemaker_entrypoint.sh of the vLLM image",
        (),
        {
            "SM_VLLM_MODEL": "{model}", "SM_VLLM_MAX_MODEL_LEN": "512",
            "SM_VLLM_SERVED_MODEL_NAME": "assistant", "SM_VLLM_ENFORCE_EAGER": "",
            "SM_VLLM_ENABLE_LORA": "true", "SM_VLLM_MAX_LORAS": "2",
            "SM_VLLM_LORA_MODULES": _ADAPTER, "SM_VLLM_HF_TOKEN": "hf_of_sagemaker",
            "SAGEMAKER_BIND_TO_PORT": "8080",
        },
        {
            "max_model_len": 512, "served_model_name": ["assistant"], "enforce_eager": True,
            "hf_token": "***", "lora_modules": {"sql": "{adapter}"},
        },
        ("assistant", "sql"),
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "aws: the image's guide, with the address that it demands; no port from the platform",
        (),
        {"SM_VLLM_MODEL": "{model}", "SM_VLLM_HOST": "0.0.0.0", "SM_VLLM_MAX_MODEL_LEN": "512"},
        {"max_model_len": 512},
        ("{model}", "lmi"),
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "aws: the same script, whose entry is vLLM's module",
        ("python3", "-m", "vllm.entrypoints.openai.api_server", "--port", "8080", "--model",
         "{model}", "--max-model-len", "512"),
        {},
        {"max_model_len": 512},
        address="http://0.0.0.0:8080",
    ),
    Deployment(
        "hugging face: sagemaker_entrypoint.sh of its vLLM image, which finds the model itself",
        (),
        {
            "HF_MODEL_ID": "{model}", "SM_VLLM_MAX_MODEL_LEN": "512", "HF_ENABLE_LMCACHE": "0",
            "SM_VLLM_TENSOR_PARALLEL_SIZE": "1", "SAGEMAKER_BIND_TO_PORT": "8080",
        },
        {"model_id": "{model}", "max_model_len": 512, "tensor_parallel_size": 1},
        ("{model}", "lmi"),
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "tgi: sagemaker-entrypoint.sh and the launcher's variables",
        (),
        {
            "MODEL_ID": "{model}", "NUM_SHARD": "1", "MAX_TOTAL_TOKENS": "512",
            "MAX_INPUT_TOKENS": "256", "SAGEMAKER_BIND_TO_PORT": "8080",
        },
        {"max_model_len": 512, "tgi_compat": True},
        ("lmi",),
        "http://0.0.0.0:8080",
    ),
    Deployment(
        "nim: NIM_MODEL_NAME's command line, any argument of vllm serve",
        ("--model", "{model}", "--served-model-name", "assistant", "aide", "--max-num-seqs=8"),
        {},
        {"served_model_name": ["assistant", "aide"], "max_num_seqs": 8},
        ("assistant", "aide"),
        "http://0.0.0.0:8080",
    ),
)  # fmt: skip

IMAGE: Final = MappingProxyType({"SERVING_INFERENCE_ADDRESS": "http://0.0.0.0:8080"})  # its ENV


@dataclass(frozen=True)
class Start:
    """A row with its placeholders filled: what the image makes of it."""

    words: list[str]  # of our own command line, the verb first
    environ: Mapping[str, str]
    command_line: CommandLine
    settings: Settings
    rows: Mapping[str, object]
    models: tuple[str, ...]


def started(row: Deployment, places: Mapping[str, str]) -> Start:
    """Return the start of that row; `places` are the model, the adapter and the certificates."""

    def filled(text: str) -> str:
        for name, place in places.items():
            text = text.replace(f"{{{name}}}", place)
        return text

    environ = {**IMAGE, **{name: filled(value) for name, value in row.environ.items()}}
    given = [filled(word) for word in row.words]
    words = as_verb(given, environ) if given else ["serve"]
    line = command_line_of(parse(words), OPTIONS)
    rows = json.loads(filled(json.dumps(dict(row.rows))))
    names = tuple(map(filled, row.models))
    return Start(words, environ, line, CONFIGURATION.load(environ, line), rows, names)
