"""Worked examples: whole configurations through `explain --format json`."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from lmi_vllm.config.vllm_schema import load_release
from tests.unit.conftest import ExplainRun

ALWAYS = {  # passed at every start, differing from vLLM's default or not
    "tensor_parallel_size": 4,
    "max_num_seqs": 256,
    "max_loras": 4,
}


@dataclass(frozen=True)
class Example:
    """One configuration; `arguments` are those that it is about."""

    id: str
    arguments: dict[str, Any]
    file: str = ""
    environ: str = ""
    gpus: int = 4
    server: dict[str, Any] = field(default_factory=dict)
    warnings: int = 0
    errors: tuple[str, ...] = ()


EXAMPLES = (
    Example("hub id", {"model": "acme/tiny"}, environ="HF_MODEL_ID=acme/tiny"),
    Example(
        "no gpu",
        {"model": "acme/tiny", "tensor_parallel_size": 1},
        environ="HF_MODEL_ID=acme/tiny",
        gpus=0,
    ),
    Example(
        "aliases",
        {
            "model": "acme/tiny",
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            "max_num_seqs": 16,
        },
        environ="HF_MODEL_ID=acme/tiny TENSOR_PARALLEL_DEGREE=2 MAX_BATCH_SIZE=16 "
        "MAX_CONCURRENT_REQUESTS=50",
        server={"job_queue_size": 50},
    ),
    Example(
        "file over environment",
        {"max_num_seqs": 8},
        file="option.max_rolling_batch_size=8",
        environ="OPTION_MAX_ROLLING_BATCH_SIZE=64",
        warnings=1,  # that names the variable
    ),
    Example(
        "option over alias",
        {"max_num_seqs": 64},
        environ="MAX_BATCH_SIZE=16 OPTION_MAX_ROLLING_BATCH_SIZE=64",
        warnings=1,  # that names the alias
    ),
    Example(
        "old lmi-dist file",
        {"dtype": "bfloat16", "quantization": "awq"},
        file="engine=MPI\noption.rolling_batch=lmi-dist\noption.dtype=bf16\n"
        "option.quantize=awq\noption.lora_extra_vocab_size=256",
        warnings=3,
    ),
    Example(
        "alias pair that differs",
        {},
        environ="OPTION_QUANTIZE=awq OPTION_QUANTIZATION=gptq",
        errors=("OPTION_QUANTIZE", "OPTION_QUANTIZATION"),
    ),
    Example(
        "batching names",
        {"max_num_batched_tokens": 32768, "cpu_offload_gb": 4.0, "enable_prefix_caching": False},
        file="option.max_rolling_batch_prefill_tokens=32768\noption.cpu_offload_gb_per_gpu=4\n"
        "option.enable_prefix_caching=FALSE",
    ),
    Example(
        "lora",
        {
            "enable_lora": True,
            "max_lora_rank": 32,
            "tensor_parallel_size": 1,
            "data_parallel_size": 4,
        },
        file="option.enable_lora=true\noption.max_lora_rank=24\noption.tensor_parallel_degree=1",
        warnings=1,  # the rank
    ),
    Example(
        "vllm's name only",
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        file="option.tensor_parallel_size=2",
    ),
    Example(
        "pipeline",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        file="option.pipeline_parallel_degree=2",
    ),
    Example(
        "modality limits",
        {"limit_mm_per_prompt": {"image": 4}},
        file='option.limit_mm_per_prompt={"image": 4}',
    ),
    Example(
        "tgi names",
        {"enforce_eager": True, "gpu_memory_utilization": 0.8},
        environ="ENABLE_CUDA_GRAPHS=false CUDA_MEMORY_FRACTION=0.8",
    ),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.id)
def test_worked_example_gives_exactly_these_arguments(
    example: Example, explained: ExplainRun
) -> None:
    """Every argument that differs from vLLM's default is the one the example names."""
    run = explained(example.file, example.environ, "--gpus", str(example.gpus))
    defaults = {name: row.default for name, row in load_release().engine.items()}
    differing = {
        name: value
        for name, value in run.engine_args.items()
        if value != defaults[name] and (name, value) != ("max_model_len", -1)
        and (name, value) != ("enable_lora", False)  # vLLM's default is unset, which means false
        and (name, value) != ("trust_remote_code", False)
    }  # fmt: skip
    expected = {
        name: value for name, value in (ALWAYS | example.arguments).items()
        if value != defaults[name]
    }  # fmt: skip
    if "engine=" in example.file:  # which makes the store itself the model directory
        assert differing.pop("model").endswith("/store")
    assert differing == expected
    assert {name: run.server[name] for name in example.server} == example.server
    assert len(run.warnings) == example.warnings, run.warnings
    assert run.exit_code == (2 if example.errors else 0)
    for name in example.errors:
        assert any(name in sentence for sentence in run.errors)
    assert bool(run.errors) == bool(example.errors), run.errors
    assert example.arguments.items() <= run.engine_args.items()
