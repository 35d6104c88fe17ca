"""Failed starts of an engine: for lack of memory, or for another reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmi_vllm.engine.base import start_error
from lmi_vllm.engine.deaths import OomKills
from lmi_vllm.engine.vllm import start_failures
from lmi_vllm.engine.vllm.cache_size import CacheSize
from lmi_vllm.engine.vllm.processes import ERROR_FILE_VARIABLE
from lmi_vllm.engine.vllm.start_failures import check_length, smaller_cache, start_error_of
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


NODE = "ValueError: Available memory on node 0 (1.88/4.66 GiB) on"
KV = f"{NODE} kv cache allocation is less than requested memory for kv"


@pytest.mark.parametrize(
    ("text", "values", "advice"),
    [
        (
            f"{KV} (-1.94/0.7 GiB). Reduce CPU memory used by other processes.",
            {"gpu_memory_utilization": 0.15},
            "The model takes all of its share of the memory: raise gpu_memory_utilization (0.15 "
            "from --flag); if a higher one does not fit, set kv_cache_memory_bytes instead of it, "
            "or give more memory",
        ),
        (
            f"{KV} (2.0/4.0 GiB). Reduce CPU memory used by other processes.",
            {"gpu_memory_utilization": 0.9},
            "Lower gpu_memory_utilization (0.9 from --flag) or max_model_len",
        ),
        (
            f"{NODE} startup is less than desired CPU memory utilization (0.92, 4.1 GiB).",
            {"gpu_memory_utilization": 0.92, "max_model_len": 5},
            "Lower gpu_memory_utilization (0.92 from --flag); if the model does not fit in less, "
            "set kv_cache_memory_bytes instead of it, or give more memory",
        ),
        (
            f"{KV} (4.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE.",
            {"kv_cache_memory_bytes": 4096},
            "Lower kv_cache_memory_bytes (4096 from --flag); if max_model_len needs more, lower it,"
            " too, or give more memory",
        ),
        (
            f"{KV} (4.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE.",
            {},
            "The server has chosen this size: set a lower kv_cache_memory_bytes, or give more "
            "memory",
        ),
        (
            "8.0 GiB KV cache is needed, which is larger than the available KV cache memory",
            {"kv_cache_memory_bytes": 4096, "max_model_len": 512},
            "Raise kv_cache_memory_bytes (4096 from --flag), or lower max_model_len (512 from "
            "--flag)",
        ),
        (
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
            {},
            "Raise gpu_memory_utilization",
        ),
        (
            "Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single "
            "token. Try increasing `gpu_memory_utilization`.",
            {"gpu_memory_utilization": 0.5},
            "Raise gpu_memory_utilization (0.5 from --flag)",
        ),
        (
            "CUDA out of memory.",
            {"enable_lora": True, "max_loras": 4},
            "Lower gpu_memory_utilization, max_model_len, max_loras (4 from --flag) or "
            "max_lora_rank",
        ),
    ],
    ids=[
        "above its share",
        "share",
        "before the model",
        "size",
        "our size",
        "small",
        "nothing left",
        "nothing left for any length",
        "LoRA",
    ],
)
def test_advice_for_lack_of_memory(text: str, values: dict[str, object], advice: str) -> None:
    """It names what helps, with the value and where it was written."""
    origin = Origin(OriginKind.FLAG, "--flag")
    arguments = EngineArguments(values, dict.fromkeys(values, origin))
    error = start_error_of(ValueError("x"), text, arguments, OomKills(), {})
    assert isinstance(error, EngineMemoryError)
    assert error.text.startswith(f"the engine did not start: OOM: {text.rstrip('.')}")
    assert error.text.endswith(f". {advice}")


NEEDED = (
    "To serve at least one request with the model's max seq len (2048), (0.25 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.14 GiB). Try increasing"
)
NOTHING = "No available memory for the cache blocks. Try increasing"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "values", "free", "advice"),
    [
        (
            NEEDED,
            {"max_model_len": 2048},
            300,
            "0.29 GiB are free for the cache and what requests take: lower max_model_len (2048 "
            "from --flag), or give more memory than this container has",
        ),
        (
            NEEDED,
            {"kv_cache_memory_bytes": 9, "max_model_len": 2048},
            300,
            "0.29 GiB are free for the cache and what requests take: lower max_model_len (2048 "
            "from --flag), or give more memory than this container has",
        ),
        (
            NEEDED,
            {},
            900,
            "Set kv_cache_memory_bytes above 1234, which the server has chosen, or lower "
            "max_model_len",
        ),
        (
            NEEDED,
            {"gpu_memory_utilization": 0.5},
            900,
            "Raise gpu_memory_utilization (0.5 from --flag), or lower max_model_len",
        ),
        (
            NOTHING,
            {},
            3,
            "0.00 GiB are free for the cache and what requests take: give more memory than this "
            "container has",
        ),
        (
            NOTHING,
            {"gpu_memory_utilization": 0.5},
            900,
            "Raise gpu_memory_utilization (0.5 from --flag), or give more memory than this "
            "container has",
        ),
    ],
)
def test_advice_on_a_cpu_knows_what_is_free(
    text: str,
    values: dict[str, object],
    free: int,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No value of an option is advised that the next error would refuse."""
    monkeypatch.setattr(start_failures, "memory_place", lambda: "this container")
    origin = Origin(OriginKind.FLAG, "--flag")
    arguments = EngineArguments(values, dict.fromkeys(values, origin))
    cache = CacheSize(1234, free * MIB)
    error = start_error_of(ValueError("x"), text, arguments, OomKills(), {}, cache)
    assert error.text.endswith(f". {advice}")


def test_advice_names_the_variable_in_its_unit() -> None:
    """The option for the same size is refused beside it."""
    origin = Origin(OriginKind.VARIABLE, "VLLM_CPU_KVCACHE_SPACE")
    size = {"kv_cache_memory_bytes": 2 << 30}
    arguments = EngineArguments(size, dict.fromkeys(size, origin))
    text = f"{KV} (2.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE."
    error = start_error_of(ValueError("x"), text, arguments, OomKills(), {})
    assert ". Lower VLLM_CPU_KVCACHE_SPACE (2, in GiB); if max_model_len" in error.text


@pytest.mark.parametrize(
    ("values", "helps"),
    [
        ({}, "set kv_cache_memory_bytes below 1234, which the server has chosen"),
        ({"kv_cache_memory_bytes": 9}, "lower kv_cache_memory_bytes (9 from --flag)"),
        ({"gpu_memory_utilization": 0.9}, "lower gpu_memory_utilization (0.9 from --flag)"),
    ],
)
def test_what_helps_against_the_oom_killer(
    values: dict[str, object], helps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller cache, once an engine on a CPU has one."""
    errors = tmp_path / "errors"
    origin = Origin(OriginKind.FLAG, "--flag")
    arguments = EngineArguments(values, dict.fromkeys(values, origin))
    assert smaller_cache(arguments, errors) == ""
    with_slots = replace(arguments, values={"enable_lora": True, "max_loras": 4})
    slots = "lower max_loras (4 from default) or max_lora_rank"
    assert smaller_cache(with_slots, errors) == slots
    monkeypatch.delenv(ERROR_FILE_VARIABLE, raising=False)
    CacheSize(1234, 9).note()
    assert smaller_cache(arguments, errors) == ""
    monkeypatch.setenv(ERROR_FILE_VARIABLE, str(errors))
    CacheSize(1234, 9).note()
    assert smaller_cache(arguments, errors) == helps


@pytest.mark.parametrize(
    ("length", "own", "served", "is_enough"),
    [
        (384, 2048, 0, True),  # the first engine
        (2048, 2048, 2048, True),
        (2047, 2048, 2048, False),
        (384, 2048, 2048, False),
        (600, 2048, 800, True),  # fitted before, too
        (599, 2048, 800, False),
        (512, 512, 2048, False),
    ],
)
def test_engine_serves_what_the_one_before_it_served(
    length: int, own: int, served: int, *, is_enough: bool
) -> None:
    """Else clients are told that prompts are too long which were answered before."""
    if is_enough:
        check_length(length, own, served)
        return
    with pytest.raises(EngineMemoryError, match=f"fits {length} .* served {served} "):
        check_length(length, own, served)
