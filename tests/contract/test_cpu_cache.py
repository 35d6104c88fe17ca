"""The size of the KV cache that the server chooses on a CPU."""

import os

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from lmi_vllm.engine.vllm import configuration
from lmi_vllm.engine.vllm.configuration import CPU_KV_CACHE_BYTES, adjusted_for_cpu
from lmi_vllm.engine.vllm.processes import CHOSEN_VARIABLE, workers_here
from lmi_vllm.messages import EngineArguments

pytestmark = pytest.mark.vllm
GIB, SIZE = 1 << 30, "kv_cache_memory_bytes"


@pytest.mark.parametrize(
    ("free", "values", "size"),
    [
        (5 * GIB, {}, 5 * GIB // 4),
        (90 * GIB, {}, CPU_KV_CACHE_BYTES),
        (8 * GIB, {"tensor_parallel_size": 2}, GIB),  # of each rank: a quarter together
        (8 * GIB, {"tensor_parallel_size": 2, "nnodes": 2}, 2 * GIB),
        (8 * GIB, {"data_parallel_size": 2}, GIB),
        (8 * GIB, {"gpu_memory_utilization": 0.5}, None),
        (8 * GIB, {SIZE: 7}, 7),
    ],
    ids=str,
)
def test_size_that_the_server_chooses(
    monkeypatch: pytest.MonkeyPatch, free: int, values: dict[str, object], size: int | None
) -> None:
    """A part of what this process may still take, in its container; the worker is told."""
    monkeypatch.setattr(configuration, "free_host_memory", lambda: free)
    monkeypatch.setenv(CHOSEN_VARIABLE, "")
    adjusted = adjusted_for_cpu(EngineArguments(values))
    assert adjusted.values.get(SIZE) == size
    assert (CHOSEN_VARIABLE in os.environ) is (SIZE not in values and size is not None)
    if CHOSEN_VARIABLE in os.environ:
        whole = min(free // 4, CPU_KV_CACHE_BYTES)
        assert workers_here() == whole // size
