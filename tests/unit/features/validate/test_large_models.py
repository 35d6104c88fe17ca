"""The estimate of large models, held to figures of their makers and of vLLM's published logs."""

from collections.abc import Mapping
from typing import Any

import pytest

from lmi_vllm.features.validate.kv_cache import AttentionLayers, KvCache, attention_layers, kv_cache
from lmi_vllm.features.validate.memory_estimate import GIB, MemoryEstimate, estimate_memory
from lmi_vllm.features.validate.model_shape import ModelShape, read_shape
from lmi_vllm.features.validate.weights import Weights, count_weights
from tests.support.vllm_routes import script

PAGE = script("memory_page")
LOADED, fits, shapes = PAGE.LOADED, PAGE.fits, PAGE.shapes
MODELS = pytest.mark.parametrize("recorded", shapes().values(), ids=list(shapes()))
Recorded = Mapping[str, Any]


def counted(config: Mapping[str, object]) -> Weights:
    """The weights of a family that is counted."""
    weights = count_weights(config)
    assert weights is not None
    return weights


def estimated(
    shape: ModelShape, arguments: Mapping[str, object], device: float | None = None
) -> MemoryEstimate:
    """The estimate without the size of files; `device` in GiB."""
    found = estimate_memory(shape, arguments, None, None if device is None else int(device * GIB))
    assert found is not None
    return found


@MODELS
def test_counted_weights_are_the_published_ones(recorded: Recorded) -> None:
    """Bytes of the checkpoint and parameters, to 0.3 %."""
    weights = counted(recorded["config"])
    assert {"weights", "parameters"} & set(recorded)
    if figure := recorded.get("weights"):
        stored = weights.stored_bytes(2) or 2 * weights.total
        assert stored == pytest.approx(figure["bytes"], rel=0.003)
    if figure := recorded.get("parameters"):
        assert weights.total == pytest.approx(figure["number"], rel=0.003)


@MODELS
def test_kv_bytes_of_a_token_are_the_published_ones(recorded: Recorded) -> None:
    """Exactly, where a vendor or a paper states them."""
    found = estimated(read_shape(recorded["config"]), {})
    if figure := recorded.get("kv"):
        assert found.kv_bytes_per_token == figure["bytes"]
    assert found.kv_bytes_per_token > 0


@pytest.mark.parametrize("log", LOADED, ids=lambda log: log.model)
def test_weights_in_memory_are_those_of_published_logs(log: Any) -> None:
    """What vLLM said that loading took on one GPU, to 3.5 %."""
    found = estimated(read_shape(shapes()[log.model]["config"]), log.arguments)
    assert found.weight_bytes / GIB == pytest.approx(log.gib, rel=0.035)


def test_tokens_of_the_cache_are_those_of_a_published_log() -> None:
    """5.29 GiB held 43,296 tokens of Llama 3.1 8B; 5.11 GiB 33,504 of the 70B model in FP8."""
    small = estimated(read_shape(shapes()["llama-3.1-8b"]["config"]), {})
    assert small.cache.longest(5.29 * GIB) == pytest.approx(43_296, rel=0.002)
    large = read_shape(shapes()["llama-3.1-70b"]["config"])
    fp8 = estimated(large, {"kv_cache_dtype": "fp8"})
    assert fp8.cache.longest(5.11 * GIB) == pytest.approx(33_504, rel=0.002)


def test_estimate_is_not_below_published_figures() -> None:
    """Llama 3.1 8B on 24 GB: a published start had 43,296 tokens, eager, at 0.9."""
    shape = read_shape(shapes()["llama-3.1-8b"]["config"])
    found = estimated(shape, {"gpu_memory_utilization": 0.9}, 24)
    assert found.longest_fit == pytest.approx(43_296, rel=0.15)


SLIDING = (  # config.json, layers that see everything, layers with a window
    ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}, 3, 3),
    ({"sliding_window": 8, "model_type": "gemma2"}, 3, 3),
    ({"sliding_window": 8, "model_type": "gemma3_text"}, 1, 5),
    ({"sliding_window": 8, "sliding_window_pattern": 3}, 2, 4),
    ({"sliding_window": 8}, 0, 6),
    ({"sliding_window": 8, "use_sliding_window": False}, 6, 0),
    ({"sliding_window": None}, 6, 0),
)


@pytest.mark.parametrize(("config", "full", "sliding"), SLIDING)
def test_layers_with_a_window_are_counted_apart(
    config: Mapping[str, object], full: int, sliding: int
) -> None:
    """As the families state them."""
    layers = attention_layers({"num_hidden_layers": 6} | dict(config))
    assert layers == AttentionLayers(full, sliding, 8 if sliding else None)


def test_window_bounds_the_blocks_of_a_sequence() -> None:
    """Up to the window every layer grows, beyond it only the full ones."""
    cache = kv_cache(AttentionLayers(10, 20, window=100), 2.0, in_flight=29)
    assert cache == KvCache(20, 40, window=128)
    assert cache.bytes_of(64) == 64 * 20 + (64 + 16) * 40
    assert cache.bytes_of(1000) == 1000 * 20 + (128 + 16) * 40
    assert cache.longest(cache.bytes_of(1000)) == 1000
    assert cache.longest(cache.bytes_of(64)) == 64


def test_unlike_groups_of_layers_are_rounded_up() -> None:
    """Gemma 3: 10 full layers and 52 with a window take 10 and 60."""
    assert kv_cache(AttentionLayers(10, 52, window=1), 1.0, 0) == KvCache(10, 60, window=0)


def test_lora_slots_are_split_on_one_side_only() -> None:
    """Of A and B, unless they are fully sharded."""
    shape = read_shape(shapes()["llama-3.1-8b"]["config"])
    slots = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 1, "tensor_parallel_size": 2}
    attention = (4096 + 4096 / 2) * 2 + 2 * (4096 + 1024 / 2)  # q and o, k and v
    mlp = 2 * (4096 + 14336 / 2) + (14336 / 2 + 4096)
    assert estimated(shape, slots).lora_bytes == (attention + mlp) * 32 * 2
    whole = 2 * 8192 + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    sharded = estimated(shape, slots | {"fully_sharded_loras": True})
    assert sharded.lora_bytes == whole / 2 * 32 * 2


QUANTIZED = (  # quantization_config, bits of a number
    ({"quant_method": "fp8"}, 8),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ({"quant_method": "compressed-tensors",
      "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ({"quant_method": "quark"}, None),
)  # fmt: skip


@pytest.mark.parametrize(("quantization", "bits"), QUANTIZED)
def test_bits_of_a_quantized_checkpoint(
    quantization: Mapping[str, object], bits: float | None
) -> None:
    """A method that is not counted has no estimate without the size of the files."""
    config = shapes()["llama-3.1-8b"]["config"] | {"quantization_config": quantization}
    stored = counted(config).stored
    assert (None if stored is None else stored.bits) == bits
    shape = read_shape(config)
    assert (estimate_memory(shape, {}, None, None) is None) == (bits is None)
    assert estimate_memory(shape, {}, 1000, None) is not None


def test_mixture_that_is_not_counted_has_no_estimate() -> None:
    """Without the size of its files."""
    config = shapes()["mixtral-8x7b"]["config"] | {"model_type": "jamba"}
    assert estimate_memory(read_shape(config), {}, None, None) is None


WHAT_FITS = (  # model, devices, GiB of each, what the page says
    ("llama-3.1-70b", 1, 79.2, "-"),
    ("deepseek-v3", 8, 79.2, "-"),
    ("qwen2.5-7b", 8, 79.2, "32,768 · 615, 2 copies"),
)


@pytest.mark.parametrize(("model", "gpus", "device", "said"), WHAT_FITS)
def test_page_says_what_fits(model: str, gpus: int, device: float, said: str) -> None:
    """70B in bf16 on 80 GB, DeepSeek V3 on eight of them; 28 heads over eight take two copies."""
    assert fits(model, gpus, device) == said


def test_model_known_to_fit_fits() -> None:
    """gpt-oss-120b on one device of 80 GB, DeepSeek V3 on eight of 141 GB."""
    assert fits("gpt-oss-120b", 1, 79.2).startswith("131,072")
    assert fits("deepseek-v3", 8, 139.8).startswith("163,840")
