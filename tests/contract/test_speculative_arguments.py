"""Speculative decoding: what our options become is what vLLM's own configuration understands.

Each kind of drafter is a tiny checkpoint; no engine starts. What each does to answers, on the real
engine: integration/speculative_decoding.py.
"""

from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.config.speculative import SpeculativeMethod

from lmi_vllm.features.speculation.rules import with_draft_files
from lmi_vllm.messages import EngineArguments
from tests.contract.vllm_configuration import engine_arguments, vllm_configuration
from tests.support.draft_models import DRAFTERS, MEDUSA_HEADS

pytestmark = pytest.mark.vllm


def drafter(kind: str, folder: Path) -> Path:
    """Make a checkpoint of that kind, where this release still has it: 0.33 dropped Medusa."""
    if kind not in get_args(SpeculativeMethod):
        pytest.skip(f"this vLLM has no {kind}")
    return DRAFTERS[kind](folder)


def understood(arguments: EngineArguments) -> Any:
    """VLLM's configuration of speculative decoding."""
    return vllm_configuration(arguments).speculative_config


@pytest.mark.parametrize("kind", DRAFTERS)
def test_draft_option_is_read_from_the_folder_s_files(kind: str, tmp_path: Path) -> None:
    """By LMI's three options alone."""
    folder = drafter(kind, tmp_path / f"{kind.replace('_', '')}-head")
    length = MEDUSA_HEADS if kind == "medusa" else 4
    lines = f"option.speculative_draft_model={folder}\noption.speculative_length={length}\n"
    lines += "option.draft_model_tp_size=1\n"
    config = understood(engine_arguments(lines, tmp_path / "model"))
    assert (config.method, config.num_speculative_tokens) == (kind, length)
    assert config.draft_model_config.model == str(folder)
    assert config.draft_parallel_config.tensor_parallel_size == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("eagle", "EAGLE-LLaMA3-Instruct-8B", id="eagle by name"),
        pytest.param("eagle3", "sl-EAGLE3-LLaMA3.1", id="eagle3 by name"),
        pytest.param("eagle3", "head", id="eagle3 by its class"),
        pytest.param("medusa", "head", id="medusa by its heads"),
        pytest.param("draft_model", "head", id="else a model that drafts"),
    ],
)
def test_kind_of_a_fetched_drafter_comes_from_its_files_or_name(
    kind: str, name: str, tmp_path: Path
) -> None:
    """The folder of a cache has no name; vLLM alone would take any head for a model that drafts."""
    lines = f"option.speculative_draft_model=s3://bucket/{name}/\noption.speculative_length=3\n"
    arguments = engine_arguments(lines, tmp_path / "model")
    config = understood(with_draft_files(arguments, drafter(kind, tmp_path / "f00d")))
    assert config.method == kind
    assert config.draft_model_config.model == str(tmp_path / "f00d")


def test_ngram_needs_no_model(tmp_path: Path) -> None:
    """In JSON, as vLLM takes it now, and by the names it had before."""
    new = 'option.speculative_config={"method":"ngram","num_speculative_tokens":3,'
    new += '"prompt_lookup_max":4}\n'
    old = "option.speculative_model=[ngram]\noption.num_speculative_tokens=3\n"
    old += "option.ngram_prompt_lookup_max=4\n"
    for lines in (new, old):
        config = understood(engine_arguments(lines, tmp_path / "model"))
        assert (config.method, config.num_speculative_tokens) == ("ngram", 3)
        assert (config.prompt_lookup_min, config.prompt_lookup_max) == (4, 4)


def test_method_of_the_user_wins(tmp_path: Path) -> None:
    """Even where the folder says otherwise."""
    folder = DRAFTERS["medusa"](tmp_path / "heads")
    lines = f'option.speculative_config={{"method":"draft_model","model":"{folder}"}}\n'
    config = engine_arguments(lines, tmp_path / "model").values["speculative_config"]
    assert config == {"method": "draft_model", "model": str(folder)}


def test_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    """VLLM's own list."""
    lines = 'option.speculative_config={"method":"telepathy","num_speculative_tokens":3}\n'
    with pytest.raises(ValueError, match=r"ngram.*eagle"):
        understood(engine_arguments(lines, tmp_path / "model"))
