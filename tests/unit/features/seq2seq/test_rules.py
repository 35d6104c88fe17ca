"""Encoder-decoder models: who runs them, and what of the settings is refused or has no effect."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.seq2seq.rules import runs_here
from lmi_vllm.messages import EngineArguments, ModelArtifacts, Origin, OriginKind
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate_checkpoint
from tests.unit.conftest import ExplainRun

T5 = "T5ForConditionalGeneration"


def write(folder: Path, architecture: str = T5, **fields: Any) -> Path:
    """Write a model directory with this config.json."""
    config = json.dumps({"architectures": [architecture], **fields})
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("architecture", "arguments", "is_ours"),
    [
        (T5, {}, True),
        ("BartForConditionalGeneration", {"model_impl": "auto"}, True),
        (T5, {"model_impl": "transformers"}, True),
        (T5, {"model_impl": "vllm"}, False),
        ("WhisperForConditionalGeneration", {}, False),
        ("LlamaForCausalLM", {}, False),
        ("LlamaForCausalLM", {"model_impl": "transformers"}, False),
    ],
)
def test_architecture_chooses_the_engine(
    architecture: str, arguments: dict[str, object], is_ours: bool
) -> None:
    """Ours runs what vLLM does not; an implementation of vLLM's that the user names wins."""
    found = runs_here([architecture], arguments)
    assert found == (architecture if is_ours else None)


def test_model_without_config_is_not_decided(explained: ExplainRun, tmp_path: Path) -> None:
    """A hub id whose config.json was not read, or a folder without one, says nothing."""
    assert explained("option.enable_lora=true", "HF_MODEL_ID=google/flan-t5-small").errors == []
    (tmp_path / "model.py").touch()
    assert explained("option.enable_lora=true", {"HF_MODEL_ID": str(tmp_path)}).errors == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("option.enable_lora=true", "enable_lora=True"),
        ("option.quantize=fp8", "quantization=fp8"),
        ("option.speculative_config={\"method\":\"ngram\",\"num_speculative_tokens\":2}",
         "does not decode speculatively"),
        ("option.task=text-embedding", "only generates"),
        ("option.tool_call_parser=hermes\noption.enable_auto_tool_choice=true", "has no parsers"),
        ("option.scheduling_policy=priority", "order of arrival"),
        ("option.hf_overrides={\"a\":1}", "hf_overrides"),
        ("option.kv_cache_dtype=fp8", "kv_cache_dtype=fp8"),
    ],
)  # fmt: skip
def test_option_that_the_engine_lacks_is_refused(
    explained: Callable[..., Any], tmp_path: Path, line: str, words: str
) -> None:
    """The error names option, origin, architecture and engine."""
    errors = explained(f"option.model_id={write(tmp_path)}\n{line}").errors
    error = next(error for error in errors if words in error)
    assert f"{T5} runs on the Transformers engine" in error
    assert "serving.properties" in error


def test_several_front_ends_are_refused(explained: Callable[..., Any], tmp_path: Path) -> None:
    """The engine lives in one process."""
    environ = {"LMI_FRONTEND_PROCESSES": "2"}
    errors = explained(f"option.model_id={write(tmp_path)}", environ).errors
    assert any("LMI_FRONTEND_PROCESSES" in error and T5 in error for error in errors)


def test_quantized_checkpoint_is_refused(explained: Callable[..., Any], tmp_path: Path) -> None:
    """The engine reads plain weights."""
    folder = write(tmp_path, quantization_config={"quant_method": "gptq"})
    errors = explained(f"option.model_id={folder}").errors
    assert any("quantization_config" in error for error in errors)


def test_tuning_of_vllm_is_a_warning(explained: Callable[..., Any], tmp_path: Path) -> None:
    """What only sizes vLLM's cache changes no answer: said once, and the start goes on."""
    run = explained(
        f"option.model_id={write(tmp_path)}\noption.gpu_memory_utilization=0.5\n"
        "option.max_rolling_batch_size=8\noption.max_model_len=256\noption.dtype=fp32"
    )
    assert run.errors == []
    assert [warning for warning in run.warnings if "Transformers engine" in warning] == [
        *[warning for warning in run.warnings if "is served by the Transformers" in warning],
        *[warning for warning in run.warnings if warning.startswith("gpu_memory_utilization=0.5")],
    ]
    assert len([warning for warning in run.warnings if "Transformers engine" in warning]) == 2


def test_fetched_model_is_checked_too(tmp_path: Path) -> None:
    """Of a hub id the architecture is known only once it is here."""
    model = str(write(tmp_path))
    arguments = EngineArguments(
        {"model": model, "enable_lora": True}, {"enable_lora": Origin(OriginKind.FILE, "a file")}
    )
    artifacts = ModelArtifacts("m", model, model)
    found = translate_checkpoint(load_settings({}), artifacts, Devices(), arguments)
    assert any("enable_lora=True (a file)" in error for error in found.errors)
    plain = EngineArguments({"model": model})
    (said,) = translate_checkpoint(load_settings({}), artifacts, Devices(), plain).warnings
    assert said.startswith(f"{T5} is an encoder-decoder model")


def test_all_devices_mean_one(explained: ExplainRun, tmp_path: Path) -> None:
    """`max` is what the guides recommend for T5: it is what the engine can use, and said."""
    model = {"HF_MODEL_ID": str(write(tmp_path))}
    run = explained("option.tensor_parallel_degree=max\noption.load_format=pt", model)
    assert run.errors == []
    assert run.engine_args["tensor_parallel_size"] == 1
    assert any("means one device" in warning for warning in run.warnings)
    run = explained("option.max_rolling_batch_size=8", model)
    assert run.engine_args["tensor_parallel_size"] == 1  # the default is `max`
    run = explained("option.pipeline_parallel_degree=1\noption.tensor_parallel_degree=1", model)
    assert "data_parallel_size" not in run.engine_args
    (error,) = explained("option.tensor_parallel_degree=2", model).errors
    assert "runs on one device" in error
