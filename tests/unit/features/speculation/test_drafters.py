"""What a drafter in a local folder is taken for. That vLLM agrees: tests/contract."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.speculation.rules import draft_reference, with_draft_files
from lmi_vllm.messages import EngineArguments
from tests.unit.conftest import ExplainRun

LLAMA = {"architectures": ["LlamaForCausalLM"]}
CASES = [
    pytest.param("acme/EAGLE-LLaMA3-Instruct-8B", LLAMA, "eagle", id="eagle by name"),
    pytest.param("acme/EAGLE3-LLaMA3.1", LLAMA, "eagle3", id="eagle3 by name"),
    pytest.param("a/b", {"architectures": ["EagleLlamaForCausalLM"]}, "eagle", id="eagle by class"),
    pytest.param("a/b", {"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3", id="eagle3 first"),
    pytest.param("a/b", {"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3", id="eagle3 last"),
    pytest.param("a/b", {"medusa_num_heads": 5}, "medusa", id="medusa without a type"),
    pytest.param("a/medusa", LLAMA, None, id="a model that drafts"),
    pytest.param("a/b", {"architectures": {"0": "Eagle"}}, None, id="no list"),
    pytest.param("a/b", {"architectures": []}, None, id="an empty list"),
    pytest.param("a/b", None, None, id="no config.json"),
]


def drafter(folder: Path, config: dict[str, Any] | None) -> Path:
    """A folder that states this."""
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("written", "config", "method"), CASES)
def test_fetched_drafter(
    tmp_path: Path, written: str, config: dict[str, Any] | None, method: str | None
) -> None:
    """By the name it was asked for, which its folder has not, and by what it states."""
    given = {"model": written, "num_speculative_tokens": 3, "revision": "main"}
    arguments = EngineArguments({"speculative_config": given, "seed": 1}, {})
    local = drafter(tmp_path / "f00d", config)
    result = with_draft_files(arguments, local).values
    expected = {"model": str(local), "num_speculative_tokens": 3}
    assert result["speculative_config"] == expected | ({"method": method} if method else {})
    assert result["seed"] == 1


@pytest.mark.parametrize(
    "lines",
    [
        "option.speculative_draft_model={folder}",
        'option.speculative_config={{"model":"{folder}","num_speculative_tokens":5}}',
        "option.speculative_model={folder}",
    ],
)
def test_local_drafter_under_every_name(tmp_path: Path, explained: ExplainRun, lines: str) -> None:
    """`explain` shows the method, too."""
    local = drafter(tmp_path / "heads", {"medusa_num_heads": 5})
    config = explained(lines.format(folder=local)).engine_args["speculative_config"]
    assert (config["method"], config["model"]) == ("medusa", str(local))


def test_vllm_name_of_the_length_works_beside_lmi_model_id(
    explained: ExplainRun,
) -> None:
    """Two that differ are an error; equal ones are fine, as everywhere."""
    text = "option.speculative_draft_model=acme/draft\noption.num_speculative_tokens=3\n"
    run = explained(text)
    assert run.engine_args["speculative_config"]["num_speculative_tokens"] == 3
    assert not any("speculative" in said for said in run.warnings)
    assert not explained(text + "option.speculative_length=3\n").errors
    errors = explained(text + "option.speculative_length=4\n").errors
    assert any("num_speculative_tokens=3" in said for said in errors)


def test_method_that_was_set_wins(tmp_path: Path, explained: ExplainRun) -> None:
    """Whatever the folder states."""
    local = drafter(tmp_path / "heads", {"medusa_num_heads": 5})
    text = f'option.speculative_config={{"method":"draft_model","model":"{local}"}}'
    config = explained(text).engine_args["speculative_config"]
    assert config == {"method": "draft_model", "model": str(local)}


def test_kind_of_a_hub_drafter_is_read_once_it_is_fetched(explained: ExplainRun) -> None:
    """Not before: its folder says more than its name."""
    config = explained("option.speculative_draft_model=acme/EAGLE-LLaMA3").engine_args
    assert "method" not in config["speculative_config"]


def test_nothing_is_fetched_for_methods_without_a_model() -> None:
    """Nor for a model that is here."""
    for config in ({"method": "ngram"}, {"model": "[ngram]"}, {"method": "suffix", "model": "x"}):
        assert draft_reference({"speculative_config": config}) is None
    found = draft_reference({"speculative_config": {"model": "a/b", "revision": "v1"}})
    assert found is not None
    assert (found.model, found.revision) == ("a/b", "v1")


@pytest.mark.parametrize("name", ["speculative_length", "spec_length"])
def test_speculation_length_zero_turns_it_off(name: str, explained: ExplainRun) -> None:
    """LMI takes 0 beside a draft model, and guesses nothing."""
    run = explained(f"option.model_id=a/b\noption.draft_model_id=a/c\noption.{name}=0")
    assert run.errors == []
    assert "speculative_config" not in run.engine_args
    assert any("speculation is off" in warning for warning in run.warnings)
