"""The table of sources: `file:` URLs are paths."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.config.model_source import locate_model
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.errors import DownloadError, ModelSourceError
from lmi_vllm.messages import ModelArtifacts
from tests.support.adapter_files import copy_adapter
from tests.support.assembled import AdapterSources, fetch_model, load_settings


def located(environ: Mapping[str, str], **flags: object) -> ModelArtifacts:
    """Return the model of these settings."""
    settings = load_settings(environ, CommandLine(**flags))  # type: ignore[arg-type]
    model = locate_model(settings, environ)
    assert model is not None
    return model


FORMS = ["file:{path}", "file:{path}/", "file://{path}", "file://localhost{path}", "FILE:{path}"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model directory with a space in its name and options of its own."""
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "serving.properties").write_text("option.dtype=fp16")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_file_url_is_the_path_as_model(model: Path, tmp_path: Path, form: str) -> None:
    """HF_MODEL_ID, --model, -m and a model_store entry: each form is the directory."""
    url = form.format(path=str(model).replace(" ", "%20"))
    environ = {"SERVING_MODEL_STORE": str(tmp_path / "none")}
    for found in (
        located({**environ, "HF_MODEL_ID": url}),
        located(environ, model=url),
        located(environ, models=f"test={url}"),
        located(environ, models=url),
    ):
        assert (found.model, found.directory) == (str(model), model)
    assert located(environ, models=f"test={url}").name == "test"
    assert fetch_model(url, environ={}) == model


@pytest.mark.parametrize("form", FORMS)
def test_file_url_has_its_own_options(model: Path, form: str) -> None:
    """The serving.properties of a directory that is named by URL is read like a path's."""
    url = form.format(path=str(model).replace(" ", "%20"))
    assert load_settings({"HF_MODEL_ID": url}).model.dtype == "float16"


@pytest.mark.parametrize("form", FORMS)
def test_file_url_is_the_path_as_adapter(tmp_path: Path, form: str) -> None:
    """`src=file:/dir` names the folder."""
    adapter = copy_adapter(tmp_path / "adapter")
    assert AdapterSources({}).resolve(form.format(path=adapter)) == str(adapter)


@pytest.mark.parametrize("variable", ["HF_MODEL_ID", "SERVING_LOAD_MODELS"])
def test_file_url_that_leads_nowhere_is_named(variable: str) -> None:
    """Neither a missing path nor another machine is mistaken for a hub id."""
    with pytest.raises(ModelSourceError, match="does not exist"):
        located({variable: "file:/no/such"})
    with pytest.raises(ModelSourceError, match="names the machine elsewhere: write file:///path"):
        located({variable: "file://elsewhere/model"})
    with pytest.raises(DownloadError, match="does not exist"):
        fetch_model("file:/no/such", environ={})
