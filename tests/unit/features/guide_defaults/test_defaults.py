"""What `explain` says of defaults that LMI's guides give otherwise."""

import pytest

from lmi_vllm.config.vllm_schema import load_release
from lmi_vllm.features.guide_defaults.defaults import GUIDE_DEFAULTS
from tests.unit.conftest import ExplainRun


def test_defaults_that_are_not_the_guides_are_listed(explained: ExplainRun) -> None:
    """With the release that changed them; a value of one's own is a row like any other."""
    run = explained("option.gpu_memory_utilization=0.8", "HF_MODEL_ID=a/b")
    assert run.option("gpu_memory_utilization")["value"] == 0.8
    row = run.option("enable_prefix_caching")
    assert (row["value"], row["origin"]) == (True, "default")
    assert "LMI's guides say false" in row["note"]
    assert "vLLM 0.8" in row["note"]
    row = explained("option.seed=1", "HF_MODEL_ID=a/b").option("gpu_memory_utilization")
    assert row["value"] == 0.92
    assert "guides say 0.9; this is the default of vLLM 0.20" in row["note"]
    assert "enable_prefix_caching" not in run.engine_args


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable_chunked_prefill", True, "vLLM 0.8"),
        ("max_rolling_batch_prefill_tokens", "auto", "vLLM 0.8"),
        ("limit_mm_per_prompt", 999, "vLLM 0.8.4"),
        ("generation_config", "auto", "vLLM 0.8"),
        ("fully_sharded_loras", False, "then and now"),
        ("dtype", "auto", "LMI's guides say fp16"),
        ("max_model_len", -1, "the model's own length"),
        ("max_rolling_batch_size", 256, "older ones 32"),
        ("tensor_parallel_degree", "max", "the common page 1"),
        ("predict_timeout", 240.0, "LMI's guides say 120"),
        ("inference_address", "http://127.0.0.1:8080", "which images set"),
    ],
)
def test_default_that_is_not_the_guides_has_a_row(
    explained: ExplainRun, name: str, value: object, words: str
) -> None:
    """One row with what stands, and why; none of them becomes an argument of its own."""
    row = explained("", "HF_MODEL_ID=a/b").option(name)
    assert (row["value"], row["origin"]) == (value, "default")
    assert "LMI's guides say" in row["note"]
    assert words in row["note"]


def test_option_that_is_set_is_not_compared_with_the_guides(explained: ExplainRun) -> None:
    """Its row is the only one, and says nothing of defaults."""
    options = {
        "dtype": "bf16", "max_model_len": "512", "generation_config": "vllm",
        "max_num_batched_tokens": "4096", "limit_mm_per_prompt": '{"image":2}',
    }  # fmt: skip
    run = explained("\n".join(f"option.{name}={text}" for name, text in options.items()))
    for name in options:
        assert "LMI's guides" not in run.option(name)["note"]


def test_defaults_of_vllm_are_those_that_are_recorded() -> None:
    """What vLLM's own table leaves open, or where it agrees with the guides again, is noticed."""
    recorded = load_release().engine
    for name in ("gpu_memory_utilization", "generation_config", "fully_sharded_loras"):
        assert GUIDE_DEFAULTS[name].now is None
        assert recorded[name].default is not None
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        assert recorded[name].default is None
