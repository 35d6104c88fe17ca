"""Files that options name count from the model's folder, and exist before the engine starts."""

from pathlib import Path

import pytest

from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.translate.devices import Devices
from lmi_vllm.translate.model_paths import located
from tests.support.assembled import CONFIGURATION
from tests.unit.conftest import ExplainRun

NAMES = ("chat_template", "tool_parser_plugin", "reasoning_parser_plugin")


@pytest.mark.parametrize("name", NAMES)
def test_relative_path_counts_from_the_models_folder(tmp_path: Path, name: str) -> None:
    """As in LMI, wherever the server was started; a missing file is an error with its option."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    environ = {"HF_MODEL_ID": str(tmp_path), f"OPTION_{name.upper()}": "own/file.txt"}
    translator = CONFIGURATION.translator
    translation = translator.translate_start(CONFIGURATION.load(environ), environ, Devices(1))
    (error,) = (text for text in translation.errors if name in text)
    assert f"names a file that does not exist: it is neither in {tmp_path} nor in" in error
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file.txt").touch()
    translation = translator.translate_start(CONFIGURATION.load(environ), environ, Devices(1))
    assert not any(name in text for text in translation.errors)
    found = translation.arguments.values.get(name) or getattr(translation.profile, name)
    assert found == str(tmp_path / "own" / "file.txt")


def test_inline_template_is_no_path(tmp_path: Path) -> None:
    """Neither is a path of a hub model's, which counts from the working directory."""
    model = ModelArtifacts("m", "a/b", "a/b", directory=tmp_path)
    (tmp_path / "x").touch()
    assert located("{{ x }}", model) == "{{ x }}"
    assert located("x", model) == str(tmp_path / "x")
    assert located("x", None) == "x"
    assert located(None, model) is None


@pytest.mark.parametrize("text", ["4;5", "gpu4;gpu5", "GPU4, gpu5"])
def test_devices_may_be_named_as_in_lmi(explained: ExplainRun, text: str) -> None:
    """`gpu4` is device 4."""
    given = f"option.tensor_parallel_degree=1\nload_on_devices={text}"
    run = explained(given, "HF_MODEL_ID=a/b", "--gpus", "8")
    assert run.engine_args["device_ids"] == [4, 5]


def test_start_without_a_model_is_said(explained: ExplainRun) -> None:
    """`load_models=NONE` starts; an empty store does not."""
    assert "serve would stop" in explained().option("model_id")["note"]
    note = explained("", "SERVING_LOAD_MODELS=NONE").option("model_id")["note"]
    assert "starts without a model" in note


def test_adapter_of_the_start_without_files_is_found_before_the_engine(
    explained: ExplainRun, tmp_path: Path
) -> None:
    """The engine had loaded first; an id of the hub, or a store, is looked for later."""
    modules = f"a=/nope b={tmp_path} c=acme/x d=s3://b/x e=file://{tmp_path}/gone"
    environ = {"HF_MODEL_ID": "a/b", "OPTION_ENABLE_LORA": "true"}
    run = explained("", {**environ, "OPTION_LORA_MODULES": modules})
    named = [error for error in run.errors if "lora_modules" in error]
    assert [error.split("adapter ")[1][0] for error in named] == ["a", "e"]
    assert "/nope does not exist" in named[0]


def test_text_that_no_path_can_be_stays_as_it_is(tmp_path: Path) -> None:
    """A name of more than 255 bytes: the system refuses to look, which Python raises."""
    long = "x" * 5000
    assert located(long, ModelArtifacts("m", "a/b", "a/b", directory=tmp_path)) == long


@pytest.mark.parametrize(
    ("name", "value", "argument"),
    [
        ("OPTION_TOKENIZER", "{}", "tokenizer"),
        (
            "OPTION_SPECULATIVE_CONFIG",
            '{{"model": "{}", "num_speculative_tokens": 2}}',
            "speculative_config",
        ),
        ("OPTION_SPECULATIVE_DRAFT_MODEL", "{}", "speculative_config"),
    ],
)
def test_tokenizer_and_draft_model_have_to_be_there(
    tmp_path: Path, name: str, value: str, argument: str
) -> None:
    """A folder has a file of the kind, too: vLLM would find out after its import."""
    (tmp_path / "config.json").write_text("{}", "utf-8")
    other = tmp_path / "other"
    environ = {"HF_MODEL_ID": str(tmp_path), name: value.format(other)}

    def errors() -> list[str]:
        settings = CONFIGURATION.load(environ)
        found = CONFIGURATION.translator.translate_start(settings, environ, Devices(1)).errors
        return [text for text in map(str, found) if str(other) in text]

    (missing,) = errors()
    assert missing.startswith(argument)
    assert missing.endswith(f"{other} does not exist")
    other.mkdir()
    (empty,) = errors()
    assert f"{other} has none of " in empty
    (other / "config.json").write_text("{}", "utf-8")
    assert not errors()
