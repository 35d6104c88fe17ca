"""The estimate of the KV cache against vLLM's own allocator, on shapes that no CPU could load."""

from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.features.validate.memory_estimate import GIB, estimate_memory
from lmi_vllm.features.validate.model_shape import ModelShape, read_shape
from tests.support.vllm_routes import script

pytestmark = pytest.mark.vllm
shapes = script("memory_page").shapes
ENDLESS = 50_000_000  # tokens: above what fits, so that memory is the bound


def layers_of(shape: ModelShape) -> dict[str, Any]:
    """The specifications of each layer's cache, as vLLM's models would make them."""
    torch = pytest.importorskip("torch")
    cache = pytest.importorskip("vllm.v1.kv_cache_interface")
    attention = shape.attention
    assert attention is not None
    common = {"block_size": 16, "dtype": torch.bfloat16}
    size = {"num_kv_heads": shape.kv_heads, "head_size": shape.head_size}
    full = cache.FullAttentionSpec(**common, **size)
    if shape.latent_size is not None:
        full = cache.MLAAttentionSpec(**common, num_kv_heads=1, head_size=shape.latent_size)
    found = {f"full.{i}": full for i in range(attention.full)}
    if attention.window is not None:
        window = cache.SlidingWindowSpec(**common, **size, sliding_window=attention.window)
        found |= {f"window.{i}": window for i in range(attention.sliding)}
    return found


def configuration(tokens_in_flight: int) -> SimpleNamespace:
    """What the allocator reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=ENDLESS),
        max_in_flight_tokens=tokens_in_flight,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(
                is_block_outermost=False, stride_order=(0, 1, 3, 2, 4)
            ),
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None,
    )


def longest_of(config: SimpleNamespace, layers: dict[str, Any], free: int) -> int:
    """The longest sequence of vLLM's allocator, which 0.33 moved and gave a builder."""
    kv = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    builder = []
    if not hasattr(kv, "get_kv_cache_groups"):
        kv = pytest.importorskip("vllm.v1.core.kv_cache_planning")
        builder = [kv.DefaultKVCacheConfigBuilder()]
    groups = kv.get_kv_cache_groups(config, layers)
    longest: int = kv._estimate_max_model_len_from_groups(*builder, config, groups, free)
    return longest


@pytest.mark.parametrize("model", shapes())
def test_longest_sequence_is_that_of_vllms_allocator(model: str) -> None:
    """To a thousandth: windows, groups of layers and latent attention included."""
    shape = read_shape(shapes()[model]["config"])
    estimate = estimate_memory(shape, {"max_num_batched_tokens": 8192}, None, 1000 * GIB)
    assert estimate is not None
    assert estimate.free_bytes is not None
    config = configuration(2 * 8192)
    longest = longest_of(config, layers_of(shape), estimate.free_bytes)
    assert longest < ENDLESS
    assert estimate.longest_fit == pytest.approx(longest, rel=0.001)
