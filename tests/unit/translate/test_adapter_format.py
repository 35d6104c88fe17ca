"""Adapters and the number format: vLLM's LoRA kernels for GPUs have no fp32."""

import pytest

from lmi_vllm.config.layers import CommandLine
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate, translate_start

LORA = {"HF_MODEL_ID": "a/b", "OPTION_ENABLE_LORA": "true"}


@pytest.mark.parametrize("written", ["fp32", "float"])
def test_fp32_with_adapters_is_refused_on_a_gpu(written: str) -> None:
    """By name, before anything is fetched; the engine would end with an assertion."""
    settings = load_settings(LORA | {"OPTION_DTYPE": written})
    (said,) = translate(settings, None, Devices(1)).errors
    assert "dtype (OPTION_DTYPE)" in said
    assert "option.dtype=bf16" in said
    assert translate(settings, None, Devices(0)).errors == ()


def test_fp32_without_adapters_is_passed_on() -> None:
    """And so is any other format with them."""
    plain = load_settings({"HF_MODEL_ID": "a/b", "OPTION_DTYPE": "fp32"})
    assert translate(plain, None, Devices(1)).arguments.values["dtype"] == "float32"
    short = load_settings(LORA | {"OPTION_DTYPE": "fp16"})
    assert translate(short, None, Devices(1)).errors == ()


def test_adapters_for_kinds_of_media_are_refused() -> None:
    """The start says so: each request with such a part would be an error."""
    written = {"OPTION_DEFAULT_MM_LORAS": '{"image": "/a"}'}
    (said,) = translate(load_settings(LORA | written), None, Devices(0)).errors
    assert "option.default_mm_loras (OPTION_DEFAULT_MM_LORAS) is not supported" in said
    empty = load_settings(LORA | {"OPTION_DEFAULT_MM_LORAS": "{}"})
    assert translate(empty, None, Devices(0)).errors == ()


@pytest.mark.parametrize(("gpus", "dtype"), [(0, "float32"), (1, "auto")])
def test_embedded_model_starts_everywhere(gpus: int, dtype: str) -> None:
    """In fp32 on a CPU, where its answers are exact; on a GPU in what vLLM picks."""
    settings = load_settings({}, CommandLine(demo=True))
    found = translate_start(settings, {}, Devices(gpus))
    assert found.errors == ()
    assert found.arguments.values["dtype"] == dtype
