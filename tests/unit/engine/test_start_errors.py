"""Failed starts of an engine: for lack of memory, or for another reason."""

import pytest

from lmi_vllm.engine.base import start_error
from lmi_vllm.errors import EngineMemoryError


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("torch.OutOfMemoryError: Tried to allocate", True),
        ("MemoryError", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("No available memory for the cache blocks.", True),
        ("Free memory on device (3.1/79 GiB) on startup is less than desired GPU memory", True),
        ("8.0 GiB KV cache is needed, which is larger than the available KV cache memory", True),
        ("Model architectures ['X'] are not supported for now", False),
    ],
)
def test_lack_of_memory_is_an_error_of_its_own(text: str, *, is_memory: bool) -> None:
    """In the words of torch, Python and vLLM; the text stays as it is."""
    error = start_error(text)
    assert (isinstance(error, EngineMemoryError), error.text) == (is_memory, text)
