"""VLLM_CPU_KVCACHE_SPACE: one size of the KV cache, which `validate` and errors know, too."""

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.translate.devices import Devices
from tests.support.assembled import load_settings, translate

SPACE, SIZE = "VLLM_CPU_KVCACHE_SPACE", "kv_cache_memory_bytes"


@pytest.mark.parametrize(
    ("variables", "line", "gpus", "size", "origin", "fails"),
    [
        ({SPACE: "2"}, "", 0, 2 << 30, SPACE, ""),
        ({SPACE: "2"}, f"option.{SIZE}=5", 0, 2 << 30, SPACE, ""),  # vLLM takes it, too
        ({SPACE: "2"}, "", 1, None, "", ""),  # vLLM reads it on a CPU alone
        ({SPACE: "2"}, f"option.{SIZE}=5", 1, 5, "serving.properties line 2", ""),
        ({}, f"option.{SIZE}=5", 0, 5, "serving.properties line 2", ""),
        ({SPACE: "2", f"OPTION_{SIZE.upper()}": "5"}, "", 0, None, "",
         f"{SPACE}=2 and {SIZE} (OPTION_{SIZE.upper()})=5 both size the KV cache on a CPU"),
        ({SPACE: "1.5"}, "", 0, None, "", f"{SPACE}=1.5 cannot be used: a whole number"),
        ({SPACE: "0"}, "", 0, None, "", f"{SPACE}=0 cannot be used"),
    ],
)  # fmt: skip
def test_size_of_the_cache_on_a_cpu(
    variables: dict[str, str], line: str, gpus: int, size: int | None, origin: str, fails: str
) -> None:
    """A variable comes before a file; two words for one thing are refused."""
    file = parse_properties(f"option.model_id=acme/m\n{line}")
    settings = load_settings(variables, extra_properties=file)
    translation = translate(settings, None, Devices(gpus))
    errors = (*settings.errors, *translation.errors)
    if fails:
        assert any(error.startswith(fails) for error in errors), errors
        return
    assert not errors
    assert translation.arguments.values.get(SIZE) == size
    assert str(translation.arguments.origins.get(SIZE, "")) == origin
