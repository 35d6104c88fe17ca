"""Which model is served (docs/sources.md#which-model), case by case."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from lmi_vllm.config.model_source import clean_name, locate_model
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.errors import ModelSourceError
from lmi_vllm.messages import ModelArtifacts
from tests.support.assembled import load_settings

Locate = Callable[..., ModelArtifacts | None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An empty model store."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def locate(store: Path) -> Locate:
    """Locate the model of the store with some variables."""

    def run(environ: Mapping[str, str] | None = None, **flags: object) -> ModelArtifacts | None:
        variables = {"SERVING_MODEL_STORE": str(store), **(environ or {})}
        command_line = CommandLine(**flags)  # type: ignore[arg-type]
        return locate_model(load_settings(variables, command_line), variables)

    return run


def touch(folder: Path, *names: str) -> None:
    """Empty files below `folder`."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_weights_in_the_store_are_served(store: Path, locate: Locate) -> None:
    """config.json and weights, no id: the local weights."""
    touch(store, "config.json", "model.safetensors")
    assert locate() == ModelArtifacts("model", str(store), str(store), None, store)


def test_file_with_model_id_means_the_hub_model(store: Path, locate: Locate) -> None:
    """option.model_id: the hub model, named after the model directory."""
    (store / "serving.properties").write_text("option.model_id=acme/tiny-1\noption.revision=r")
    assert locate() == ModelArtifacts("model", "acme/tiny-1", "acme/tiny-1", "r", store)


def test_hub_id_with_a_file_without_id(store: Path, locate: Locate) -> None:
    """HF_MODEL_ID with the options of the store's file."""
    (store / "serving.properties").write_text("option.max_loras=2")
    model = locate({"HF_MODEL_ID": "acme/tiny-1"})
    assert model == ModelArtifacts("acme_tiny_1", "acme/tiny-1", "acme/tiny-1", None, store)


def test_s3_prefix_is_a_reference(locate: Locate) -> None:
    """HF_MODEL_ID=s3://: the prefix, to be fetched by others."""
    assert locate({"HF_MODEL_ID": "s3://b/my-model/"}) == ModelArtifacts(
        "my_model", "s3://b/my-model/", "s3://b/my-model/"
    )


def test_hub_id_that_is_the_store_means_its_weights(store: Path, locate: Locate) -> None:
    """HF_MODEL_ID=/opt/ml/model serves the local weights."""
    touch(store, "config.json")
    model = locate({"HF_MODEL_ID": str(store)})
    assert model is not None
    assert (model.model, model.directory, model.is_local) == (str(store), store, True)


@pytest.mark.parametrize("environ", [{}, {"HF_MODEL_ID": "acme/tiny"}])
def test_adapter_alone_is_an_error(store: Path, locate: Locate, environ: dict[str, str]) -> None:
    """adapter_config.json and no model: a base model is needed."""
    touch(store, "adapter_config.json", "adapter_model.safetensors")
    with pytest.raises(ModelSourceError, match="enable_lora"):
        locate(environ)


def test_single_child_directories_are_entered(store: Path, locate: Locate) -> None:
    """A directory whose only child is a directory is entered; empty children do not count."""
    touch(store, "outer/inner/config.json")
    (store / "empty").mkdir()
    model = locate()
    assert model is not None
    assert (model.name, model.directory) == ("inner", store / "outer" / "inner")


def test_several_models_are_an_error_naming_them(store: Path, locate: Locate) -> None:
    """One model per process."""
    touch(store, "a/config.json", "b/config.json")
    with pytest.raises(ModelSourceError, match=r"a, b.*load_models"):
        locate()
    model = locate({"SERVING_LOAD_MODELS": f"mine={store}/b"})
    assert model is not None
    assert (model.name, model.directory) == ("mine", store / "b")


def test_archive_as_model_id_says_where_it_belongs(locate: Locate, tmp_path: Path) -> None:
    """HF_MODEL_ID names directories; for an archive the text says what to do instead."""
    (tmp_path / "m.zip").touch()
    with pytest.raises(ModelSourceError, match="is a file: put it into the model store"):
        locate({"HF_MODEL_ID": str(tmp_path / "m.zip")})


def test_directory_of_something_else_is_an_error(store: Path, locate: Locate) -> None:
    """A directory without anything of ours is not a model."""
    touch(store, "readme.txt")
    with pytest.raises(ModelSourceError, match="Failed to detect engine"):
        locate()


@pytest.mark.parametrize("name", ["params.json", "model.py", "w.safetensors"])
def test_directory_is_recognised_by(store: Path, locate: Locate, name: str) -> None:
    """Mistral's params.json, custom code or bare weights are enough."""
    touch(store, name)
    assert locate() is not None


def test_nothing_found_is_an_error_unless_asked_for(locate: Locate) -> None:
    """load_models=NONE and SAGEMAKER_MULTI_MODEL=true start without a model."""
    with pytest.raises(ModelSourceError, match="HF_MODEL_ID"):
        locate()
    assert locate({"SERVING_LOAD_MODELS": "NONE"}) is None
    assert locate({"SAGEMAKER_MULTI_MODEL": "true"}) is None
    assert locate({"SERVING_LOAD_MODELS": "NONE", "HF_MODEL_ID": "a/b"}) is not None


def test_model_dir_replaces_the_directory_of_the_weights(
    store: Path, tmp_path: Path, locate: Locate
) -> None:
    """option.model_dir counts when no id is set."""
    touch(tmp_path, "weights/config.json")
    (store / "serving.properties").write_text(f"option.model_dir={tmp_path}/weights")
    model = locate()
    assert model is not None
    assert (model.model, model.directory) == (f"{tmp_path}/weights", store)


def test_model_dir_that_does_not_exist_is_named(store: Path, locate: Locate) -> None:
    """It is not passed over without a message; where an id names the model it does not count."""
    touch(store, "config.json")
    (store / "serving.properties").write_text("option.model_dir=/no/such")
    with pytest.raises(ModelSourceError, match=r"option\.model_dir=/no/such .*does not exist"):
        locate()
    model = locate({"HF_MODEL_ID": "acme/tiny"})
    assert model is not None
    assert model.model == "acme/tiny"


def test_path_that_does_not_exist_is_an_error(locate: Locate) -> None:
    """An absolute path is no hub id."""
    with pytest.raises(ModelSourceError, match=r"/nonexistent.*HF_MODEL_ID"):
        locate({"HF_MODEL_ID": "/nonexistent/model"})


def test_demo_is_an_ordinary_model_directory(locate: Locate) -> None:
    """--demo serves the embedded directory."""
    model = locate({"HF_MODEL_ID": "a/b"}, demo=True)
    assert model is not None
    assert (model.model, model.directory) == (str(DEMO_MODEL_DIR), DEMO_MODEL_DIR)


NAMES = (("acme/tiny-1", "acme_tiny_1"), ("_x", "_x"), ("a.b", "a_b"), ("é", "_"))


@pytest.mark.parametrize(("name", "clean"), NAMES)
def test_names_have_only_word_characters(name: str, clean: str) -> None:
    """Everything else becomes `_`."""
    assert clean_name(name) == clean


@pytest.mark.parametrize("name", ["model.py", "requirements.txt"])
def test_code_in_the_store_stays_beside_weights_of_another_folder(
    store: Path, tmp_path: Path, locate: Locate, name: str
) -> None:
    """As in LMI the store is the model directory then: its code and packages are not ignored."""
    weights = tmp_path / "weights"
    touch(weights, "config.json")
    model = locate({"HF_MODEL_ID": str(weights)})
    assert model is not None
    assert model.directory == weights
    touch(store, name)
    model = locate({"HF_MODEL_ID": str(weights)})
    assert model is not None
    assert (model.model, model.directory) == (str(weights), store)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("serving.properties", "serving.properties use --model-store ."),
        ("config.json", "use --model ."),
        ("notes.txt", "or start with load_models=NONE"),
    ],
)
def test_model_in_the_working_directory_is_named(
    tmp_path: Path, locate: Locate, monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    """It is not looked for there; the error says how to serve it."""
    touch(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError) as error:
        locate()
    assert str(error.value).endswith(advice)
