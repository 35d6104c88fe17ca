"""The page docs/memory.md, from config/shapes/ and `validate`'s estimate (scripts/make_docs.py)."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from http_api_page import table

from lmi_vllm.assembly import configuration, load_settings
from lmi_vllm.checks.model_config import ModelFiles
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.features.validate.command import validate
from lmi_vllm.features.validate.memory_estimate import GIB, MemoryEstimate, estimate_memory
from lmi_vllm.features.validate.model_shape import read_shape
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.devices import Devices

FOLDER: Final = Path(__file__).resolve().parent.parent / "config" / "shapes"
COUNTS: Final = (1, 4, 8)
# What the driver says of a device with so many gigabytes (sources: the page).
DEVICES: Final[Mapping[str, float]] = {"24 GB": 23.6, "48 GB": 44.4, "80 GB": 79.2, "141 GB": 139.8}
SEQUENCE: Final = 8192

INTRODUCTION: Final = """\
# Memory of large models

This page is for people who choose a GPU for a model. After it you know what a model needs on each GPU, and how that is
estimated.

Generated from `config/shapes/` by `make docs`. Do not edit.

`lmi-vllm validate` estimates what a model needs on each GPU, from its config.json alone: no GPU and no weights are needed.

<!-- needs: hub -->
```sh
lmi-vllm validate --config DIR --gpus 8 --device-memory 79.2     # DIR has a config.json
lmi-vllm validate --model Qwen/Qwen3-32B --gpus 4 --device-memory 44.4
```

## The formula

```text
free       = device memory x gpu_memory_utilization - weights - LoRA slots - 2 GiB
weights    = numbers x bytes / (TP x PP)
KV a token = layers / PP x 2 x KV heads / min(TP, KV heads) x head size x bytes of kv_cache_dtype
LoRA slots = max_loras x max_lora_rank x (inputs + outputs of every linear layer) x 2 bytes / PP
```

- **Weights** are the size of the files if they are known. Otherwise the parameters are counted: attention, MLP, experts,
  embeddings. Only linear layers are quantized, so an 8B model in FP8 takes 8.5 GiB, not 7.5. The experts of an MXFP4
  checkpoint are padded, to {mxfp4} GiB in all for gpt-oss-120b. What config.json leaves out is the default of its class, as
  Transformers has it.
- **What is not counted** has no estimate, and a warning names its family: layers that are no attention (Mamba, hybrid models),
  experts under other names (Ernie 4.5, Aria), Gemma 4. An encoder (BERT) has weights and no KV cache.
- **Latent attention** (DeepSeek) keeps `kv_lora_rank + qk_rope_head_dim` numbers for each layer, on every GPU.
- **Layers with a sliding window** keep the window and the tokens of the running steps, not the whole sequence. vLLM groups
  layers, which rounds their number up. The estimate does the same.
- **LoRA**: tensor parallelism splits one of the two matrices, and with `fully_sharded_loras` both.
- **2 GiB** are reserved for the CUDA context, activations and graphs. This figure is a guess. A
  [published log](https://github.com/vllm-project/vllm/pull/10511) of an 8B model on 80 GB shows 3.05 GiB, and 4.84 GiB with
  tensor parallel 2. vLLM measures it when it starts.

If a model cannot fit into an empty device, `validate` reports an error. Otherwise it prints the numbers. They were compared
with one GPU, [an H200](performance/gpu-runs.md#the-run-on-an-h100).

## What fits

The tables show the longest sequence, and how many sequences of {sequence} tokens the KV cache holds at once (of the model's
own length if that is shorter). Only the model is set. Tensor parallelism is over all devices, `gpu_memory_utilization` is
0.92, and weights are bf16 or as the checkpoint is quantized. These are the sizes of devices: {devices}. The first three are
what PyTorch or vLLM reported of an [RTX 4090](https://github.com/ali-vilab/VGen/issues/104), an
[L40](https://github.com/QwenLM/Qwen3-VL/issues/2097) and an [80 GB device](https://github.com/vllm-project/vllm/pull/10511),
rounded down. For the fourth, an H200, we have no published report.

*-* means that the weights do not fit. *2 copies* means that the heads do not divide by the number of devices: two copies run on
half of them each, and the sequences are those of one copy. Quantization, `option.max_model_len` and `option.kv_cache_dtype=fp8` change the numbers; `validate` shows them.

"""  # noqa: E501 - lines of the page
CHECKED: Final = """\
## Checked against published figures

Every config.json in `config/shapes/` was written from public facts. Tests compare the estimate with these figures: weights
agree to 0.3 %, and the KV cache exactly. The number of tokens in the cache agrees with vLLM's own allocator to one thousandth
(`tests/contract/test_memory_estimate.py`), also for layers with a window.

"""  # noqa: E501 - lines of the page
LOGS: Final = """
Published logs of vLLM, and the estimate:

"""


@dataclass(frozen=True)
class Log:
    """A line that vLLM once printed, as published: `gib` of weights on one GPU."""

    model: str
    gib: float
    source: str
    arguments: Mapping[str, object]


LOADED: Final = (
    Log("llama-3.1-8b", 14.99, "https://github.com/vllm-project/vllm/issues/10517", {}),
    Log(
        "llama-3.1-70b", 67.72, "https://github.com/vllm-project/vllm/pull/12569",
        {"quantization": "fp8"},
    ),
    Log("gpt-oss-120b", 64.38, "https://github.com/vllm-project/vllm/issues/33155", {}),
    Log(
        "gemma-3-27b", 13.17, "https://github.com/vllm-project/vllm/issues/15676",
        {"tensor_parallel_size": 4},
    ),
)  # fmt: skip


@cache
def shapes() -> Mapping[str, Mapping[str, Any]]:
    """Return what is recorded of each model, by its short name."""
    return {
        file.stem: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(FOLDER.glob("*.json"))
    }


def translated(model: str, gpus: int) -> Translation:
    """Return what a start with nothing but the model becomes on so many GPUs."""
    files = ModelFiles(shapes()[model]["config"])
    settings = load_settings({}, CommandLine(model=shapes()[model]["model"]))
    return configuration().translator.translate_start(
        settings, {}, Devices(gpu_count=gpus), lambda _: files
    )


def estimate(model: str, arguments: Mapping[str, object], device: float | None) -> MemoryEstimate:
    """Return the estimate; every recorded model has one."""
    shape = read_shape(shapes()[model]["config"])
    found = estimate_memory(shape, arguments, None, None if device is None else int(device * GIB))
    if found is None:
        raise SystemExit(f"config/shapes/{model}.json has no estimate")
    return found


def memory_page() -> str:
    """Return the page."""
    devices = ", ".join(f"{name}: {gib} GiB" for name, gib in DEVICES.items())
    mxfp4 = f"{estimate('gpt-oss-120b', {}, None).weight_bytes / GIB:.1f}"
    lines = [INTRODUCTION.format(devices=devices, sequence=SEQUENCE, mxfp4=mxfp4)]
    for gpus in COUNTS:
        lines += [f"### {gpus} device{'s' if gpus > 1 else ''}", ""]
        lines += [*table(("model", "weights on each", *DEVICES), _rows(gpus)), ""]
    lines += [CHECKED, *table(("model", "what", "published", "estimate", "source"), _published())]
    lines += [LOGS, *table(("model", "weights on one GPU", "estimate", "source"), _logs()), ""]
    return "\n".join(lines)


def _rows(gpus: int) -> Iterator[tuple[str, ...]]:
    for model, recorded in shapes().items():
        arguments = translated(model, gpus).arguments.values
        weights = estimate(model, arguments, None).weight_bytes / GIB
        cells = (fits(model, gpus, device) for device in DEVICES.values())
        yield (recorded["model"], f"{weights:.1f} GiB", *cells)


def fits(model: str, gpus: int, device: float) -> str:
    """Return what fits, as `validate` sees it: a length and a number of sequences, or why not."""
    translation = translated(model, gpus)
    files = ModelFiles(shapes()[model]["config"])
    errors = validate(translation, files, int(device * GIB), configuration()).errors
    found = estimate(model, translation.arguments.values, device)
    longest = found.longest_fit or 0
    if errors or longest <= 0:
        return "-"
    own = read_shape(shapes()[model]["config"]).longest or longest
    at_once = found.sequences(min(own, SEQUENCE)) or 0.0
    copies = translation.arguments.values.get("data_parallel_size", 1)
    return f"{min(own, longest):,} · {at_once:,.0f}{f', {copies} copies' if copies != 1 else ''}"


def _published() -> Iterator[tuple[str, ...]]:
    for model, recorded in shapes().items():
        found, config = estimate(model, {}, None), recorded["config"]
        weights = read_shape(config).weights
        if weights is None:
            continue
        if figure := recorded.get("weights"):
            stored = weights.stored_bytes(2) or 2 * weights.total
            yield model, "weights, bytes", f"{figure['bytes']:,}", f"{stored:,}", figure["source"]
        if figure := recorded.get("parameters"):
            told = f"{weights.total:,}"
            yield model, "parameters", f"{figure['number']:,}", told, figure["source"]
        if figure := recorded.get("kv"):
            told = f"{found.kv_bytes_per_token:,}"
            yield model, "KV cache, bytes a token", f"{figure['bytes']:,}", told, figure["source"]


def _logs() -> Iterator[tuple[str, ...]]:
    for log in LOADED:
        found = estimate(log.model, log.arguments, None).weight_bytes / GIB
        name = ", ".join((log.model, *(f"{k}={v}" for k, v in log.arguments.items())))
        yield name, f"{log.gib} GiB", f"{found:.2f} GiB", log.source
