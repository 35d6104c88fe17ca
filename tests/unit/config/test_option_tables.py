"""Every option with a rule, one case for each and each value it treats apart."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from lmi_vllm.config.options import OPTIONS
from tests.unit.conftest import ExplainRun

ABSENT = object()


@dataclass(frozen=True)
class Row:
    """`option.<name>=<text>`: what it becomes, and whether it is warned or refused."""

    name: str
    text: str
    args: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    warns: bool = False
    fails: str = ""  # a part of the error beside the option's name
    also: str = ""  # further lines of the file
    warns_with: str = ""

    @property
    def id(self) -> str:
        """The row's name in the test report."""
        also = f" + {self.also}" if self.also else ""
        return f"{self.name}={self.text}{also}".replace("\n", " + ")


def warned(*names: str, text: str = "7") -> tuple[Row, ...]:
    """Rows for options that have no effect but one warning."""
    return tuple(Row(name, text, warns=True) for name in names)


TABLE_11_1 = (
    Row("model_id", "acme/tiny", {"model": "acme/tiny"}),
    Row("model_id", "s3://bucket/prefix/", {"model": "s3://bucket/prefix/"}),
    Row("revision", "main", {"revision": "main"}),
    Row("trust_remote_code", "yes", {"trust_remote_code": True}),
    Row("trust_remote_code", "true", {"trust_remote_code": True}, also="option.model_id=a/b",
        warns=True, warns_with="option.revision"),
    Row("trust_remote_code", "true", {"trust_remote_code": True},
        also="option.model_id=a/b\noption.revision=abc"),
    Row("dtype", "bf16", {"dtype": "bfloat16"}),
    Row("runner", "pooling", {"runner": "pooling", "convert": "auto"}),
    Row("runner", "trot", fails="auto, draft, generate, pooling"),
    Row("convert", "embed", {"runner": "auto", "convert": "embed"}),
    Row("ignore_patterns", "a/*,b/*", {"ignore_patterns": ["a/*", "b/*"]}),
    Row("download_dir", "/big", {"download_dir": "/big"}),
    Row("reasoning_parser_plugin", "/p.py", {"reasoning_parser_plugin": "/p.py"}),
    Row("tensor_parallel_degree", "max", {"tensor_parallel_size": 4}),
    Row("tensor_parallel_degree", "4", {"tensor_parallel_size": 4}),
    Row("max_rolling_batch_size", "8", {"max_num_seqs": 8}),
    Row("max_rolling_batch_size", "0", fails="at least 1"),
    Row("rolling_batch", "auto"),
    Row("mpi_mode", "true"),
    Row("entryPoint", "djl_python.huggingface"),
    Row("parallel_loading", "true"),
    Row("parallel_loading", "model.py"),
    Row("model_loading_timeout", "600", server={"model_loading_timeout": 600}),
    Row("model_loading_timeout", "soon", server={"model_loading_timeout": 1800}, warns=True),
    Row("predict_timeout", "30", server={"predict_timeout": 30}),
    Row("predict_timeout", "30s", server={"predict_timeout": 240}, warns=True),
    Row("output_formatter", "jsonlines", server={"output_formatter": "jsonlines"}),
    Row("output_formatter", "my_function", server={"output_formatter": "my_function"}),
    Row("output_formatter", "none", server={"output_formatter": None}, warns=True),
    Row("output_formatter", "3p", server={"output_formatter": "3p"}),
    Row("output_formatter", "3p_stream", server={"output_formatter": "3p_stream"}),
    Row("enable_streaming", "false"),
    Row("enable_streaming", "true", warns=True),
    Row("enable_streaming", "huggingface", warns=True),
    Row("tgi_compat", "true", server={"tgi_compat": True}),
    Row("single_bos", "true", server={"single_bos": True}),
    Row("bedrock_compat", "true", warns=True),
    Row("low_cpu_mem_usage", "true", warns=True),
    Row("task", "feature-extraction", {"runner": "pooling", "convert": "embed"}),
    Row("batch_size", "4", warns=True),
    Row("batch_size", "1"),
)  # fmt: skip

TABLE_11_2 = (
    Row("quantize", "awq", {"quantization": "awq"}),
    Row("quantization", "awq", {"quantization": "awq"}),
    Row("max_rolling_batch_prefill_tokens", "16k", {"max_num_batched_tokens": 16000}),
    Row("max_model_len", "16K", {"max_model_len": 16384}),
    Row("max_model_len", "auto", {"max_model_len": -1}),
    Row("load_format", "safetensors", {"load_format": "safetensors"}),
    Row("load_format", "sagemaker_fast_model_loader", fails="runai_streamer"),
    Row("enforce_eager", "1", {"enforce_eager": True}),
    Row("gpu_memory_utilization", "0.8", {"gpu_memory_utilization": 0.8}),
    Row("gpu_memory_utilization", "80", fails="0.9"),
    Row("enable_lora", "true", {"enable_lora": True, "max_loras": 4, "data_parallel_size": ABSENT}),
    Row("max_loras", "2", {"max_loras": 2}),
    Row("max_lora_rank", "24", {"max_lora_rank": 32}, warns=True),
    Row("max_lora_rank", "64", {"max_lora_rank": 64}),
    Row("max_lora_rank", "513", fails="512"),
    Row("lora_extra_vocab_size", "256", warns=True),
    Row("max_cpu_loras", "8", {"max_cpu_loras": 8}),
    Row("max_cpu_loras", "2", fails="max_loras"),
    Row("long_lora_scaling_factors", "4.0", warns=True),
    Row("fully_sharded_loras", "true", {"fully_sharded_loras": True}),
    Row("lora_dtype", "bfloat16", {"lora_dtype": "bfloat16"}),
    Row("enable_chunked_prefill", "false", {"enable_chunked_prefill": False}),
    Row("cpu_offload_gb_per_gpu", "4", {"cpu_offload_gb": 4.0}),
    Row("cpu_offload_gb", "2.5", {"cpu_offload_gb": 2.5}),
    Row("enable_prefix_caching", "true", {"enable_prefix_caching": True}),
    Row("disable_sliding_window", "true", {"disable_sliding_window": True}),
    Row("tokenizer_mode", "mistral", {"tokenizer_mode": "mistral"}),
    Row("tokenizer_mode", "slow", {"tokenizer_mode": "auto"}, warns=True),
    Row("tokenizer_mode", "true", fails="not true or false"),
    Row("device", "cuda", warns=True),
    Row("enable_auto_tool_choice", "true", server={"tool_call_parser": "hermes"},
        also="option.tool_call_parser=hermes"),
    Row("enable_auto_tool_choice", "true", fails="tool_call_parser"),
    Row("tool_call_parser", "nobody", fails="hermes", also="option.enable_auto_tool_choice=true"),
    Row("reasoning_parser", "qwen3", {"reasoning_parser": "qwen3"},
        also="option.enable_reasoning=true"),
    Row("enable_reasoning", "true", fails="reasoning_parser"),
    Row("chat_template", "/t.jinja", server={"chat_template": "/t.jinja"}),
    Row("chat_template_content_format", "openai",
        server={"chat_template_content_format": "openai"}),
    Row("chat_template_content_format", "html", fails="auto, string, openai"),
    Row("limit_mm_per_prompt", '{"image": 4}', {"limit_mm_per_prompt": {"image": 4}}),
    Row("limit_mm_per_prompt", "image=4,video=2",
        {"limit_mm_per_prompt": {"image": 4, "video": 2}}),
    Row("enable_expert_parallel", "true", {"enable_expert_parallel": True}),
    Row("hf_overrides", '{"a": 1}', {"hf_overrides": {"a": 1}}),
    Row("adapters", "my-adapters", server={"adapters": "my-adapters"}),
)  # fmt: skip

TABLE_11_3 = (
    *(Row("quantize", name, {"quantization": name}) for name in (
        "awq", "gptq", "awq_marlin", "gptq_marlin", "fp8", "compressed-tensors", "modelopt",
        "torchao", "quark", "moe_wna16", "experts_int8", "mxfp4", "mxfp8",
        "int8_per_channel_weight_only")),
    Row("quantize", "fbgemm_fp8",
        {"quantization": "fbgemm_fp8", "allow_deprecated_quantization": True}),
    Row("quantize", "fp_quant", {"quantization": "fp_quant"}),
    Row("quantize", "squeezellm", fails="awq"),
    Row("quantize", "bitsandbytes", {"quantization": "fp8"},
        warns=True, warns_with="weights of every layer to 8 bits"),
    Row("quantize", "bitsandbytes8", {"quantization": "fp8"},
        warns=True, warns_with="weights of every layer to 8 bits"),
    Row("quantize", "bitsandbytes4", fails="fp8"),
    Row("quantize", "dynamic_int8", {"quantization": "fp8"},
        warns=True, warns_with="weights of every layer to 8 bits"),
    Row("quantize", "smoothquant", fails="W8A8"),
    Row("quantize", "static_int8", fails="W8A8"),
    *(Row("quantize", name, fails="compressed-tensors") for name in (
        "gguf", "marlin", "deepspeedfp", "whatever")),
)  # fmt: skip

TABLE_11_4 = (
    Row("load_in_4bit", "false"),
    Row("load_in_4bit", "true", fails="fp8"),
    Row("load_in_8bit", "true", {"quantization": "fp8"}, warns=True),
    Row("load_in_8bit", "true", {"quantization": "fp8"}, also="option.quantize=fp8", warns=True),
    Row("load_in_8bit", "true", fails="quantize=awq", also="option.quantize=awq"),
)  # fmt: skip

SECTIONS_6_AND_7 = (
    *(Row("dtype", text, {"dtype": dtype}) for text, dtype in (
        ("auto", "auto"), ("fp32", "float32"), ("float32", "float32"), ("fp16", "float16"),
        ("float16", "float16"), ("BF16", "bfloat16"), ("bfloat16", "bfloat16"), ("half", "half"),
        ("float", "float"))),
    Row("dtype", "int8", fails="option.quantize"),
    Row("dtype", "fp8", fails="bf16"),
    *(Row("rolling_batch", text) for text in ("auto", "vllm", "disable")),
    *(Row("rolling_batch", text, warns=True) for text in (
        "lmi-dist", "scheduler", "deepspeed", "neuron", "trtllm")),
    Row("rolling_batch", "orca", fails="vllm"),
    *(Row("task", text, {"runner": runner, "convert": convert}) for text, runner, convert in (
        ("auto", "auto", "auto"), ("text-generation", "generate", "auto"),
        ("generate", "generate", "auto"), ("text-embedding", "auto", "embed"),
        ("feature-extraction", "pooling", "embed"), ("classify", "auto", "classify"),
        ("text2text-generation", "auto", "auto"), ("conversational", "auto", "auto"),
        ("embed", "pooling", "embed"), ("embedding", "pooling", "embed"),
        ("score", "pooling", "auto"), ("rerank", "pooling", "auto"))),
    Row("task", "text-embedding", {"runner": "generate", "convert": "embed"}, warns=True,
        also="option.runner=generate"),
    Row("normalize", "false", server={"normalize": False}),
    *(Row("entryPoint", text) for text in (
        "djl_python.lmi_vllm.vllm_async_service", "djl_python.huggingface")),
    *(Row("entryPoint", text, warns=True) for text in (
        "djl_python.deepspeed", "djl_python.fastertransformer", "djl_python.transformers_neuronx",
        "djl_python.tensorrt_llm", "djl_python.lmi_trtllm.handler")),
    *(Row("entryPoint", text, fails="not an LLM backend") for text in (
        "djl_python.stable_diffusion", "djl_python.sklearn_handler", "djl_python.xgboost_handler",
        "djl_python.sagemaker")),
    Row("entryPoint", "missing.py", fails="does not exist", also="engine=Python"),
    Row("entryPoint", "https://host/model.py", server={"entryPoint": "https://host/model.py"}),
    Row("handler", "predict", server={"handler": "predict"}),
    Row("async_mode", "false", warns=True),
    Row("async_mode", "true"),
    Row("enable_venv", "true", warns=True),
    Row("pythonExecutable", "/usr/bin/python3", warns=True),
)  # fmt: skip

ALL_ROWS = (
    *TABLE_11_1, *TABLE_11_2, *TABLE_11_3, *TABLE_11_4, *SECTIONS_6_AND_7,
)  # fmt: skip


@pytest.mark.parametrize("row", ALL_ROWS, ids=lambda row: row.id)
def test_row_becomes_the_specified_argument(row: Row, explained: ExplainRun) -> None:
    """Every option, and each value that it treats apart."""
    check_row(row, explained)


def check_row(row: Row, explained: ExplainRun) -> None:
    """Arguments, server settings, warnings and errors are those of the row and no others."""
    run = explained(f"option.{row.name}={row.text}\n{row.also}")
    for name, value in row.args.items():
        assert run.engine_args.get(name, ABSENT) == value
    for name, value in row.server.items():
        assert run.server[name] == value
    assert run.exit_code == (2 if row.fails else 0), run.errors
    if row.fails:
        label = f"option.{row.name}"
        assert any(label in text and row.fails in text for text in run.errors), run.errors
        assert any("serving.properties line 1" in text for text in run.errors)
        return
    ours = [text for text in run.warnings if f"option.{row.name}" in text]
    assert bool(ours) == row.warns, run.warnings
    assert all(row.warns_with in text for text in ours)
    assert not any("is not known and has no effect" in text for text in ours)  # it has a row


def test_every_option_of_the_table_has_a_case() -> None:
    """No row of the option table is without a case here."""
    covered = {row.name for row in ALL_ROWS} | {line for row in ALL_ROWS for line in (
        part.removeprefix("option.").split("=")[0] for part in row.also.split("\n"))}  # fmt: skip
    elsewhere = {"env", "model_dir", "pipeline_parallel_degree", "data_parallel_size",
                 "device_ids", "lora_modules", "served_model_name", "stream_logprobs",
                 "tool_parser_plugin"}  # fmt: skip
    assert {row.name for row in OPTIONS} - covered == elsewhere
