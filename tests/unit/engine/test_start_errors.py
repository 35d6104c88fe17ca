"""Failed starts of an engine: for lack of memory, or for another reason."""

import pytest

from lmi_vllm.engine.base import start_error
from lmi_vllm.engine.deaths import OomKills
from lmi_vllm.engine.vllm.start_failures import start_error_of
from lmi_vllm.errors import EngineMemoryError
from lmi_vllm.messages import EngineArguments, Origin, OriginKind


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


def test_text_of_a_check_is_shown_without_what_pydantic_adds() -> None:
    """With the origin of a number that it names."""
    inner = "1 validation error for ModelConfig\n  Value error, max_model_len (999) is too long "
    outer = "[type=value_error, input_value=ArgsKwargs((), {'model': 'x'}), input_type=ArgsKwargs]"
    origin = Origin(OriginKind.FLAG, "--max-model-len")
    arguments = EngineArguments({"max_model_len": 999, "seed": 9}, {"max_model_len": origin})
    error = start_error_of(ValueError(inner + outer), None, arguments, OomKills(), {})
    assert error.text == (
        "the engine did not start: max_model_len (999) is too long "
        "(max_model_len from --max-model-len)"
    )
