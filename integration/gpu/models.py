"""What is loaded: the embedded model with other options, and shapes with dummy weights."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from integration.gpu.suite import Suite
from lmi_vllm.demo import DEMO_MODEL_DIR

# By _NAMES; a vocabulary of 0 is the embedded model's.
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "tiny": (256, 2, 4, 2, 64, 512, 0),
    "1b": (2048, 16, 32, 8, 64, 8192, 128256),
    "8b": (4096, 32, 32, 8, 128, 14336, 128256),
}
_NAMES: Final = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip
LENGTH: Final = 4096
STREAMS: Final = 512
# On a CPU, where vLLM would take a share of main memory.
CPU_CACHE_BYTES: Final = 64 << 20


def copy_demo(folder: Path, **options: str) -> Path:
    """Write the embedded model with other options and without its adapters."""
    shutil.copytree(DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("adapters"))
    file = folder / "serving.properties"
    changed = {f"option.{name}" for name in options} | {"option.adapters"}
    lines = [line for line in file.read_text().splitlines() if line.split("=")[0] not in changed]
    lines += [f"option.{name}={value}" for name, value in options.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def engine_arguments(suite: Suite) -> dict[str, Any]:
    """Return the engine arguments of the shape, by vLLM's names: all servers get the same.

    One device: ours would take all of them, and `vllm serve` takes one.
    """
    arguments = {"load_format": "dummy", "max_model_len": LENGTH, "max_num_seqs": STREAMS}
    arguments |= {"tensor_parallel_size": 1, "data_parallel_size": 1}
    if suite.machine.has_gpu:
        return {**arguments, "dtype": "bfloat16", "gpu_memory_utilization": 0.9}
    cpu = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {**arguments, **cpu}


def write_shape(suite: Suite) -> Path:
    """Write a Llama of the chosen shape without weights, with the embedded model's tokenizer."""
    folder = suite.scratch() / f"llama-{suite.shape}"
    shutil.copytree(
        DEMO_MODEL_DIR, folder, ignore=shutil.ignore_patterns("adapters", "*.safetensors")
    )
    file = folder / "config.json"
    config = json.loads(file.read_text("utf-8"))
    chosen = dict(zip(_NAMES, SHAPES[suite.shape], strict=True))
    config |= {name: value for name, value in chosen.items() if value}
    config |= {"max_position_embeddings": 2 * LENGTH, "tie_word_embeddings": False}
    file.write_text(json.dumps(config), encoding="utf-8")
    _name_every_token(folder / "tokenizer.json", config["vocab_size"])
    options = {name: str(value).lower() for name, value in engine_arguments(suite).items()}
    lines = [f"option.{name}={value}" for name, value in options.items()]
    (folder / "serving.properties").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _name_every_token(file: Path, count: int) -> None:
    """Give a text to each id that the tokenizer lacks: dummy weights say any of them.

    An id without one has an empty text, which clients take for no token.
    """
    tokenizer = json.loads(file.read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    words |= {f"\u0120w{number}": number for number in range(len(words), count)}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
