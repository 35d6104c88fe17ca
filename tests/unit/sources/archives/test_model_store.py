"""Archives in the model store: a model once they are unpacked into the cache."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from lmi_vllm.config.model_source import locate_model
from lmi_vllm.messages import ModelArtifacts
from lmi_vllm.sources.archives import unpack
from tests.support.assembled import load_settings
from tests.support.s3_server import tar_gz, zip_file


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An empty model store."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def located(store: Path, environ: Mapping[str, str]) -> ModelArtifacts | None:
    """Locate the model of the store with some variables."""
    variables = {"SERVING_MODEL_STORE": str(store), **environ}
    return locate_model(load_settings(variables), variables)


@pytest.mark.parametrize("name", ["m.tar.gz", "m.tgz", "m.zip", "m.mar", "M.ZIP"])
@pytest.mark.parametrize("by_list", [False, True], ids=["store", "load_models"])
def test_archive_is_a_model_once_unpacked(
    store: Path, tmp_path: Path, name: str, by_list: bool
) -> None:
    """Before that it is named as it lies there; afterwards it is a directory like any other."""
    files = {"inner/config.json": b"{}", "inner/serving.properties": b"option.dtype=fp16"}
    (store / name).write_bytes(
        zip_file(files) if name.lower().endswith((".zip", ".mar")) else tar_gz(files)
    )
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
    if by_list:
        environ["SERVING_LOAD_MODELS"] = str(store / name)
    packed = located(store, environ)
    assert packed == ModelArtifacts(name[0], str(store / name), str(store / name))
    unpack(store / name, environ, name)
    model = located(store, environ)
    assert model is not None
    assert model.name == name[0]
    assert model.directory is not None
    assert model.directory.is_relative_to(tmp_path / "cache")
    assert (model.directory / "config.json").read_bytes() == b"{}"
    settings = load_settings({"SERVING_MODEL_STORE": str(store), **environ})
    assert settings.model.dtype == "float16", "the archive's own serving.properties"
    assert [path.name for path in store.iterdir()] == [name], "the store is only read"


def test_archive_that_changes_is_unpacked_again(store: Path, tmp_path: Path) -> None:
    """The copy in the cache belongs to one size and time of the archive."""
    environ = {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}
    (store / "m.zip").write_bytes(zip_file({"config.json": b"1"}))
    first = unpack(store / "m.zip", environ, "m.zip")
    assert unpack(store / "m.zip", environ, "m.zip") == first
    (store / "m.zip").write_bytes(zip_file({"config.json": b"22"}))
    second = unpack(store / "m.zip", environ, "m.zip")
    assert (second / "config.json").read_bytes() == b"22"
    assert not [path for path in second.parent.iterdir() if path.name.startswith(".unpacking")]
