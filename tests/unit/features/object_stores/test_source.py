"""Stores of objects: a further one is a row and a module."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock

from lmi_vllm.checks.model_config import read_model_files
from lmi_vllm.config.model_source import locate_model, with_files
from lmi_vllm.errors import DownloadError
from lmi_vllm.features.object_stores import source
from lmi_vllm.features.object_stores.source import StoreSource
from lmi_vllm.features.sessions.start import upload_directory
from lmi_vllm.features.transfer import naming_what_is_slow
from lmi_vllm.sources.base import FetchRequest, StoredObject
from tests.support.adapter_files import CAPITALS
from tests.support.assembled import SOURCES, AdapterSources, fetch_model, load_settings
from tests.support.fetching import wait_until
from tests.support.remote_models import explained, planned

OBJECTS = {
    "tiny/config.json": b"{}",
    "tiny/model.safetensors": b"w" * 2000,
    "lora/adapter_config.json": (CAPITALS / "adapter_config.json").read_bytes(),
    "lora/adapter_model.safetensors": (CAPITALS / "adapter_model.safetensors").read_bytes(),
}


class MemoryStore:
    """All that a further kind of store has to bring: here, objects of this process."""

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self.url = self.listed_url = url
        self.prefix = f"{url.partition('://')[2].rstrip('/')}/"

    def list_objects(self, most: int | None = None) -> Sequence[StoredObject]:
        """Every object below the prefix."""
        names = [key.removeprefix(self.prefix) for key in OBJECTS if key.startswith(self.prefix)]
        return [found for name in names if (found := self.find(name))]

    def find(self, name: str) -> StoredObject | None:
        """One object."""
        key = f"{self.prefix}{name}"
        return StoredObject(name, key, len(OBJECTS[key]), "v1") if key in OBJECTS else None

    def read(self, name: str) -> bytes | None:
        """One object's content."""
        return OBJECTS.get(f"{self.prefix}{name}")

    def download(self, objects: Sequence[StoredObject], directory: Path, attempt: int) -> None:
        """Write the objects."""
        for stored in objects:
            (directory / stored.name).write_bytes(OBJECTS[stored.key])

    def is_intact(self, stored: StoredObject, path: Path) -> bool:
        """Nothing alters it here."""
        return True

    def upload(self, name: str, path: Path) -> None:
        """Take a file."""
        OBJECTS[f"{self.prefix}{name}"] = path.read_bytes()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Return variables of an empty cache; the table has a row for mem:// URLs."""
    row = StoreSource("mem", MemoryStore)
    monkeypatch.setattr(SOURCES, "stores", (row, *SOURCES.stores))
    return {"SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}


@pytest.mark.parametrize("name", ["HF_MODEL_ID", "SERVING_LOAD_MODELS"])
def test_row_serves_a_model(environ: dict[str, str], name: str) -> None:
    """The model is found, its config.json read ahead, and what is fetched is its directory."""
    environ[name] = "mem://tiny/"
    settings = load_settings(environ)
    model = locate_model(settings, environ)
    assert model is not None
    assert (model.name, model.model, model.directory) == ("tiny", "mem://tiny/", None)
    assert read_model_files(model, environ, SOURCES).config == {}
    local = fetch_model(model.model, environ=environ)
    assert (local / "model.safetensors").read_bytes() == b"w" * 2000
    assert with_files(model, settings, local, SOURCES).directory == local


def test_row_serves_adapters_and_is_written_to(environ: dict[str, str], tmp_path: Path) -> None:
    """Adapters come from there, sessions and caches go there, images are filled from there."""
    folder = AdapterSources(environ).resolve("mem://lora/")
    assert (Path(folder) / "adapter_config.json").is_file()
    (tmp_path / "a.txt").write_text("kept")
    assert upload_directory(tmp_path, "mem://sessions/", environ, SOURCES) >= 1
    assert OBJECTS["sessions/a.txt"] == b"kept"
    target = fetch_model("mem://tiny/", destination=tmp_path / "out", environ=environ)
    assert (target / "config.json").read_bytes() == b"{}"
    assert SOURCES.store_examples()[0] == "mem://bucket/prefix/"


@pytest.mark.parametrize("asked", ["list_objects", "read"])
def test_store_that_lets_us_wait_is_named(
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
) -> None:
    """The client's own error of a silent store comes after minutes."""
    answer = getattr(MemoryStore, asked)

    def slow(*arguments: object) -> object:
        wait_until(lambda: "has not answered for 0.05 s" in caplog.text, 10)
        return answer(*arguments)

    monkeypatch.setattr(MemoryStore, asked, slow)
    monkeypatch.setattr(source, "naming_what_is_slow", partial(naming_what_is_slow, seconds=0.05))
    if asked == "read":
        request = FetchRequest("mem://tiny/", environ)
        assert StoreSource("mem", MemoryStore).read_text(request, "config.json") == "{}"
    else:
        fetch_model("mem://tiny/", environ=environ)
    assert "mem://tiny/" in caplog.text


def test_what_another_process_fetches_is_waited_for_aloud(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Init containers that share a volume: the second one says what it waits for."""
    lock = FileLock(tmp_path / "out.lock", thread_local=False)
    lock.acquire()
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(
            fetch_model, "mem://tiny/", destination=tmp_path / "out", environ=environ
        )
        try:
            wait_until(lambda: "Another process is fetching mem://tiny/" in caplog.text, 10)
        finally:
            lock.release()
        assert fetching.result(20) == tmp_path / "out"
    assert str(tmp_path / "out.lock") in caplog.text


def test_explain_reads_the_prefix_as_a_start_does(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own options count; a prefix without objects is an error, and not config.json's lack."""
    own = b"option.max_model_len=64\noption.model_id=acme/other\n"
    monkeypatch.setitem(OBJECTS, "tiny/serving.properties", own)
    document = explained({**environ, "HF_MODEL_ID": "mem://tiny/"}, capsys)
    assert document["engine_args"]["max_model_len"] == 64
    monkeypatch.setitem(OBJECTS, "tiny/serving.properties", b"")
    listed = explained({**environ, "SERVING_LOAD_MODELS": "tiny=mem://tiny/"}, capsys)
    (row,) = (one for one in listed["options"] if one["name"] == "model_id")
    assert row["origin"] == "SERVING_LOAD_MODELS"
    given = {**environ, "HF_MODEL_ID": "mem://typo/"}
    (error,) = explained(given, capsys)["errors"]
    assert error.startswith("option.model_id (HF_MODEL_ID): mem://typo/ holds no objects")
    with pytest.raises(DownloadError, match="holds no objects"):
        planned(given)
    (error,) = explained({**environ, "HF_MODEL_ID": "hf://acme/x"}, capsys)["errors"]
    assert "'hf://acme/x' is neither an existing path" in error


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that takes no files")
@pytest.mark.parametrize("reference", ["mem://tiny/", "acme/tiny"])
def test_place_that_takes_no_lock_is_named(environ: dict[str, str], reference: str) -> None:
    """The library of the lock takes it for another process, and would wait for ever."""
    with pytest.raises(DownloadError, match=r"cannot be stored (in|at) /proc"):
        fetch_model(reference, destination=Path("/proc/model"), environ=environ)


def test_upload_needs_a_store(tmp_path: Path) -> None:
    """A path is no store, and the text says what is one."""
    with pytest.raises(DownloadError, match="is no URL of a store, such as s3://"):
        upload_directory(tmp_path, "/somewhere", {}, SOURCES)
