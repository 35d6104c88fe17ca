"""Base rows beside adapters' rows on a CPU, where the worker is not ours (DECISIONS.md 9, 56).

The defect is that of `base_rows`, which a `worker_cls` of the user's does not have. The engine gets
one slot more, and requests of the base model carry a pinned adapter whose product is zero in it.

Upstream: https://github.com/vllm-project/vllm/pull/48421.
Releases: 0.31 and 0.32.
Shows: answers of the base model that change when an adapter is in use.
May go: with 0.33 as the least release that we support; then
    test_plain_vllm_computes_base_rows_with_an_adapter has nothing to show.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from lmi_vllm.checks.adapter_config import CONFIG, PREFIX, WEIGHTS
from lmi_vllm.checks.safetensors_header import read_tensors
from lmi_vllm.engine.vllm.adapters import BASE_ADAPTER_ID, BASE_ADAPTER_NAME
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import AdapterRefusedError, EngineStartError

logger = logging.getLogger(__name__)

# Linear layers of known architectures, most common first; one that exists is enough.
_ZERO_MODULES: Final = (
    "q_proj", "qkv_proj", "query_key_value", "c_attn", "wqkv", "W_pack", "o_proj", "dense",
    "down_proj", "fc1",
)  # fmt: skip


async def load_zero_adapter(
    add: Callable[[LoadedAdapter, str], Awaitable[None]], model: Path, folder: Path
) -> None:
    """Have `add` put the all-zero adapter into the engine.

    Raises:
        EngineStartError: no all-zero adapter fits this model, so base rows would be wrong.
    """
    for module, rows, columns in linear_layers(model):
        write_zero_adapter(folder, module, rows, columns)
        adapter = LoadedAdapter(BASE_ADAPTER_ID, BASE_ADAPTER_NAME, str(folder), "base")
        try:
            await add(adapter, str(folder))
        except AdapterRefusedError as error:
            logger.debug("no all-zero adapter on %s: %s", module, error)
            continue
        return
    raise EngineStartError(
        "enable_lora on CPU: no linear layer was found for the all-zero adapter that keeps "
        "base answers apart from adapters' (a vLLM bug on CPU); start without enable_lora"
    )


def linear_layers(model: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (module name, rows, columns) of one layer per known kind, from safetensors headers."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors"))[:1]:
        for name, tensor in read_tensors(file).items():
            if name.endswith(".weight") and len(tensor.shape) == 2:  # noqa: PLR2004 (a matrix)
                shapes[name.removesuffix(".weight")] = (tensor.shape[0], tensor.shape[1])
    for kind in _ZERO_MODULES:
        for module, (rows, columns) in shapes.items():
            if module.endswith("." + kind):
                yield module, rows, columns
                break


def write_zero_adapter(folder: Path, module: str, rows: int, columns: int) -> None:
    """Write a rank-1 PEFT adapter whose product is zero, in safetensors form."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"lora_A": (1, columns), "lora_B": (rows, 1)}
    zeros = {
        f"{PREFIX}{module}.{name}.weight": np.zeros(shape, np.float32)
        for name, shape in tensors.items()
    }
    save_file(zeros, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": 1,
        "lora_alpha": 1,
        "bias": "none",
        "target_modules": [module.rsplit(".", 1)[-1]],
    }
    (folder / CONFIG).write_text(json.dumps(config))
