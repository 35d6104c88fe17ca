"""Options whose work a CPU hardly shows: what of them stands in vLLM's own configuration."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.tokenizers.registry import TokenizerRegistry

from tests.contract.vllm_configuration import engine_arguments, vllm_configuration
from tests.support.vllm_namespace import namespace_of

pytestmark = pytest.mark.vllm
WINDOW = 64
WINDOWED = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW
}  # fmt: skip


def configuration(lines: str, folder: Path, **config: Any) -> Any:
    """VLLM's configuration for the embedded model with these lines, and another config.json."""
    return vllm_configuration(engine_arguments(lines, folder, config))


@pytest.mark.parametrize("mode", ["auto", "slow", *sorted(TokenizerRegistry.tokenizers)])
def test_tokenizer_mode_arrives(mode: str, tmp_path: Path) -> None:
    """Every mode that vLLM has; `slow` is auto."""
    model = configuration(f"option.tokenizer_mode={mode}\n", tmp_path).model_config
    assert model.tokenizer_mode == ("auto" if mode == "slow" else mode)


@pytest.mark.parametrize("name", ["cpu_offload_gb_per_gpu", "cpu_offload_gb"])
def test_offloaded_gigabytes_arrive(name: str, tmp_path: Path) -> None:
    """Under LMI's name and vLLM's."""
    offload = configuration(f"option.{name}=2.5\n", tmp_path).offload_config
    assert offload.uva.cpu_offload_gb == 2.5


@pytest.mark.parametrize(("disable", "longest"), [("false", 2048), ("true", WINDOW)])
def test_sliding_window_is_the_models_until_disabled(
    disable: str, longest: int, tmp_path: Path
) -> None:
    """Disabled, no request may be longer than what one window sees."""
    lines = f"option.disable_sliding_window={disable}\n"
    model = configuration(lines, tmp_path, **WINDOWED).model_config
    assert model.get_sliding_window() == (None if disable == "true" else WINDOW)
    assert model.max_model_len == longest


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False)])
def test_prefix_caching_and_chunks_are_switches(
    value: str,
    expected: bool,
    tmp_path: Path,
) -> None:
    """Each of them alone."""
    lines = f"option.enable_prefix_caching={value}\noption.max_model_len=512\n"
    config = configuration(lines, tmp_path)
    assert config.cache_config.enable_prefix_caching is expected
    assert config.scheduler_config.enable_chunked_prefill is True
    lines = f"option.enable_chunked_prefill={value}\noption.max_model_len=512\n"
    config = configuration(lines, tmp_path)
    assert config.scheduler_config.enable_chunked_prefill is expected
    assert config.cache_config.enable_prefix_caching is True


@pytest.mark.parametrize(("text", "expected"), [("a.b", ["a.b"]), ("a.b,c.d", ["a.b", "c.d"])])
def test_middleware_may_be_several(text: str, expected: list[str], tmp_path: Path) -> None:
    """As the flag may be given several times on vLLM's command line."""
    arguments = engine_arguments(f"option.middleware={text}\n", tmp_path)
    assert namespace_of(arguments.values).middleware == expected
