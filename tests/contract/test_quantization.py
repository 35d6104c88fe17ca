"""Each value of `option.quantize` and each kind of quantized checkpoint, as vLLM understands them.

What the server refuses by itself: tests/unit/config/test_quantization_page.py. What a CPU answers:
`make matrix`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

from lmi_vllm.errors import ConfigurationError
from tests.contract.vllm_configuration import engine_arguments, vllm_configuration

pytestmark = pytest.mark.vllm
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel"},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True,
              "packing_format": "auto_round:auto_gptq", "data_type": "int"}  # fmt: skip
PLAIN: Mapping[str, Any] = {}
# option.quantize, the checkpoint's quantization_config, the class that reads the weights
READ = [
    pytest.param("", AWQ, "AutoAWQConfig", id="Mistral AWQ"),
    pytest.param("", GPTQ, "AutoGPTQConfig", id="Llama 3.1 GPTQ"),
    pytest.param("", FP8, "Fp8Config", id="Qwen2 fp8"),
    pytest.param("", W8A8, "CompressedTensorsConfig", id="W8A8"),
    pytest.param("awq", AWQ, "AutoAWQConfig", id="awq"),
    pytest.param("gptq", GPTQ, "AutoGPTQConfig", id="gptq"),
    pytest.param("gptq_marlin", GPTQ, "AutoGPTQConfig", id="gptq_marlin"),
    pytest.param("fp8", FP8, "Fp8Config", id="fp8 of an fp8 checkpoint"),
    pytest.param("fp8", PLAIN, "OnlineQuantizationConfig", id="fp8"),
    pytest.param("bitsandbytes", PLAIN, "OnlineQuantizationConfig", id="bitsandbytes"),
    pytest.param("bitsandbytes8", PLAIN, "OnlineQuantizationConfig", id="bitsandbytes8"),
    pytest.param("dynamic_int8", PLAIN, "OnlineQuantizationConfig", id="dynamic_int8"),
    pytest.param("compressed-tensors", W8A8, "CompressedTensorsConfig", id="compressed-tensors"),
    pytest.param("experts_int8", PLAIN, "ExpertsInt8Config", id="experts_int8"),
    pytest.param("", AUTO_ROUND, "INCConfig", id="auto-round"),
]
REFUSED = [
    pytest.param("fp8", AWQ, r"\(awq\) does not match", id="fp8 on AWQ"),
    pytest.param("gptq", AWQ, r"\(awq\) does not match", id="gptq on AWQ"),
    pytest.param("awq_marlin", AWQ, r"\(awq\) does not match", id="awq_marlin on a CPU"),
]


def configuration(
    quantize: str, quantized: Mapping[str, Any], folder: Path, *, has_experts: bool = False
) -> Any:
    """VLLM's configuration for the embedded model, said to be quantized like that."""
    lines = "option.dtype=fp16\n" + (f"option.quantize={quantize}\n" if quantize else "")
    changes: dict[str, object] = {"quantization_config": quantized} if quantized else {}
    if has_experts:
        changes["num_local_experts"] = 2
    return vllm_configuration(engine_arguments(lines, folder, changes, gpus=1))


@pytest.mark.parametrize(("quantize", "quantized", "reader"), READ)
def test_weights_are_read_by(
    tmp_path: Path, quantize: str, quantized: Mapping[str, Any], reader: str
) -> None:
    """The class that vLLM picks."""
    is_mixture = quantize == "experts_int8"
    found = configuration(quantize, quantized, tmp_path, has_experts=is_mixture)
    assert type(found.quant_config).__name__ == reader


@pytest.mark.parametrize(("quantize", "quantized", "said"), REFUSED)
def test_vllm_refuses(
    tmp_path: Path, quantize: str, quantized: Mapping[str, Any], said: str
) -> None:
    """Two methods at once."""
    with pytest.raises(ValueError, match=said):
        configuration(quantize, quantized, tmp_path)


@pytest.mark.parametrize("method", ["bitsandbytes", "squeezellm"])
def test_unsupported_quantization_is_refused_before_the_engine(tmp_path: Path, method: str) -> None:
    """With the alternative, before the engine starts; and this vLLM really has lost the method."""
    with pytest.raises(ConfigurationError, match=f"{method} .*use the unquantized model"):
        configuration("", {"quant_method": method}, tmp_path)
    assert method not in QUANTIZATION_METHODS


@pytest.mark.parametrize("method", ["experts_int8", "int8_per_channel_weight_only"])
def test_8bit_option_without_effect_is_refused_before_the_engine(
    tmp_path: Path, method: str
) -> None:
    """VLLM takes them for a model without experts, and leaves its weights as large as they are."""
    with pytest.raises(ConfigurationError, match="halves those of every layer"):
        configuration(method, {}, tmp_path)


@pytest.mark.parametrize("method", ["fp8", "fp8_per_block", "experts_int8", "fp8_per_channel"])
def test_gpu_only_quantization_is_refused_on_cpu_before_the_engine(
    tmp_path: Path, method: str
) -> None:
    """VLLM's build for CPUs takes them, and fails in a kernel once the engine has begun."""
    experts = {} if method in ("fp8", "fp8_per_block") else {"num_local_experts": 2}
    with pytest.raises(ConfigurationError, match=f"quantization={method} needs a GPU"):
        engine_arguments(f"option.quantize={method}\n", tmp_path, experts)
