"""An answer of `explain` or `validate` that finds nothing wrong had something to look at."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmi_vllm.commands import explain
from lmi_vllm.features.validate import command as validate
from tests.support.assembled import CONFIGURATION

Run = Callable[..., tuple[int, Mapping[str, Any]]]
TINY = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return how a verb is run over an empty store."""

    def one(verb: str, *flags: str, **environ: str) -> tuple[int, Mapping[str, Any]]:
        command = {"explain": explain, "validate": validate}[verb]
        parser = argparse.ArgumentParser()
        command.add_arguments(parser, CONFIGURATION)
        given = parser.parse_args(["--format", "json", "--gpus", "1", *flags])
        store = {"SERVING_MODEL_STORE": str(tmp_path / "store")}
        code = command.run(given, {**store, **environ}, CONFIGURATION)
        return code, json.loads(capsys.readouterr().out)

    return one


def model(folder: Path, requirements: str = "") -> str:
    """Write a model's folder; return its path."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    if requirements:
        (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("verb", ["explain", "validate"])
def test_no_model_is_an_error(run: Run, verb: str) -> None:
    """As of `serve`, which ends with it."""
    code, found = run(verb)
    assert code == 2
    assert any("no model found" in error for error in found["errors"])


def test_server_that_starts_without_a_model_is_none(run: Run) -> None:
    """POST /models loads one."""
    assert run("explain", SERVING_LOAD_MODELS="NONE")[0] == 0


@pytest.mark.parametrize("flags", [["--model", "acme/tiny", "--offline"], ["--model", "{folder}"]])
def test_model_of_which_nothing_is_known_is_not_valid(
    run: Run, tmp_path: Path, flags: list[str]
) -> None:
    """Exit 0 said that all was well."""
    (tmp_path / "empty").mkdir()
    code, found = run("validate", *(flag.format(folder=tmp_path / "empty") for flag in flags))
    assert code == 2
    assert any("were not checked against the model" in error for error in found["errors"])
    assert found["checked"] == ["the settings alone"]


def test_validate_says_what_it_checked(run: Run, tmp_path: Path) -> None:
    """The files, and that there was no GPU to compare with."""
    place = model(tmp_path / "model", "requests\n")
    code, found = run("validate", "--model", place, "--device-memory", "24")
    checked = "\n".join(found["checked"])
    assert (code, found["errors"]) == (0, [])
    assert f"config.json of {place}" in checked
    assert "24.0 GiB" in checked
    assert run("validate", "--config", place)[0] == 0


@pytest.mark.parametrize("verb", ["explain", "validate"])
def test_requirements_that_serve_refuses_are_errors(run: Run, tmp_path: Path, verb: str) -> None:
    """With file and line; only `serve` said so."""
    place = model(tmp_path / "model", "requests\ntorch==1.0\n")
    code, found = run(verb, "--model", place)
    assert code == 2
    assert any("requirements.txt, line 2: torch==1.0" in error for error in found["errors"])


def test_requirements_that_are_not_installed_may_say_anything(run: Run, tmp_path: Path) -> None:
    """LMI_CUSTOM_CODE=none."""
    place = model(tmp_path / "model", "torch==1.0\n")
    assert run("explain", "--model", place, LMI_CUSTOM_CODE="none")[0] == 0


def test_memory_has_a_heading_of_its_own() -> None:
    """It is no warning where the model fits; in the JSON document it stays where it was."""
    flags = ["validate", "--demo", "--offline", "--device-memory", "24"]
    command = [sys.executable, "-m", "lmi_vllm", *flags]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    memory = table.partition("\nMemory\n")[2]
    assert memory.strip().startswith("estimate for each GPU: ")
    assert "estimate for each GPU" not in table.partition("\nMemory\n")[0]
    written = subprocess.run([*command, "--format", "json"], capture_output=True, check=True).stdout
    clauses = [line.strip() for line in memory.strip().splitlines()]
    assert len(clauses) > 2
    assert max(map(len, clauses)) < 110
    *parts, formula = clauses
    assert "--format json has the formula" in formula
    said = [text for text in json.loads(written)["warnings"] if text.startswith(parts[0])]
    assert said[0].startswith("; ".join(parts) + ". Formula: free = ")


def test_table_has_what_was_asked_for_and_no_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error stood below forty lines of LMI's defaults, which are `explain`'s to show."""

    def table(command: ModuleType, *flags: str) -> str:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser, CONFIGURATION)
        given = parser.parse_args(["--model-store", str(tmp_path), "--gpus", "1", *flags])
        command.run(given, {}, CONFIGURATION)
        return capsys.readouterr().out

    validated = table(validate, "--config", "/nope")
    assert "Errors\n  the settings were not checked" in validated
    assert len(validated.splitlines()) < 15
    whole = table(validate, "--config", "/nope", "--all")
    for title in ("Defaults that LMI's guides have otherwise", "Engine arguments"):
        assert title not in validated
        assert title in whole
        assert title in table(explain)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "none does not exist"),
        ("empty", "empty has no config.json"),
        ("8b.json", "8b.json is a file; --config names the folder of a config.json"),
    ],
)
def test_what_is_wrong_with_the_folder_of_config_is_said(
    run: Run, tmp_path: Path, name: str, text: str
) -> None:
    """Each said that the model had no config.json."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "8b.json").write_text("{}", encoding="utf-8")
    code, found = run("validate", "--config", str(tmp_path / name))
    assert code == 2
    assert any(text in error for error in found["errors"]), found["errors"]


def test_config_json_may_be_named_itself(run: Run, tmp_path: Path) -> None:
    """It stands for its folder."""
    code, found = run("validate", "--config", f"{model(tmp_path / 'tiny')}/config.json")
    assert not [error for error in found["errors"] if "not checked" in error]
    assert f"config.json of {tmp_path / 'tiny'}" in found["checked"][0]
    assert code == 0


@pytest.mark.parametrize(
    ("size", "gpus", "is_said"), [("3G", "0", True), ("1G", "0", False), ("3G", "1", False)]
)
def test_cache_above_the_memory_of_a_cpu_is_warned_of(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, gpus: str, is_said: bool
) -> None:
    """No error: the machine that serves may have more, or a GPU."""
    monkeypatch.setattr(validate, "total_host_memory", lambda: 2 << 30)
    folder = model(tmp_path / "model")
    flags = ("--model", folder, "--gpus", gpus)
    code, answer = run("validate", *flags, OPTION_KV_CACHE_MEMORY_BYTES=size)
    said = [text for text in answer["warnings"] if text.startswith("kv_cache_memory_bytes (")]
    assert (code, bool(said)) == (0, is_said)
    if is_said:
        assert "from OPTION_KV_CACHE_MEMORY_BYTES): on a CPU this KV cache of" in said[0]


def test_memory_that_is_not_there_at_all_is_warned_of(run: Run, tmp_path: Path) -> None:
    """`serve` refuses it; with the setting, its place and what is there."""
    folder = model(tmp_path / "model")
    (Path(folder) / "serving.properties").write_text("required_memory_mb=900000000\n")
    code, answer = run("validate", "--model", folder)
    (said,) = [text for text in answer["warnings"] if "required_memory_mb" in text]
    assert code == 0
    assert "serving.properties line 1): 900000000 MiB (required_memory_mb) and 500 MiB" in said
