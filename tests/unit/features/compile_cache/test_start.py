"""What a start compiled reaches the next one elsewhere, and nothing of it can fail a start."""

import asyncio
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmi_vllm.features.compile_cache.archive import files_in
from lmi_vllm.features.compile_cache.key import key_parts
from lmi_vllm.features.compile_cache.start import CompileCache, compile_cache
from lmi_vllm.features.compile_cache.store import FolderStore
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.start_parts import PlannedStart
from tests.support.assembled import SOURCES, load_settings

MODEL = ModelArtifacts("m", "org/model", "org/model")
AOT = "torch_compile_cache/torch_aot_compile"


@dataclass
class Container:
    """One container: its own disk, and the store that it shares."""

    disk: Path
    uri: str
    environ: dict[str, str] = field(default_factory=dict)
    cache: CompileCache | None = None

    def start(self, **arguments: object) -> None:
        """What a start does before the engine."""
        environ = {"LMI_CACHE_URI": self.uri, "VLLM_CACHE_ROOT": str(self.disk), **self.environ}
        settings = load_settings(environ)
        self.cache = compile_cache(
            PlannedStart("vllm", settings, environ, MODEL, EngineArguments(arguments), SOURCES)
        )
        if self.cache is not None:
            asyncio.run(self.cache.before_engine())

    @property
    def root(self) -> Path:
        """Where vLLM is told to keep its caches."""
        assert self.cache is not None
        return Path(self.cache.exports["VLLM_CACHE_ROOT"])

    @property
    def files(self) -> set[str]:
        """What vLLM finds there."""
        return set(files_in(self.root))

    def compile(self, *hashes: str) -> None:
        """What vLLM leaves behind."""
        for name in hashes:
            folder = self.root / AOT / name / "rank_0_0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "model").write_text(f"code of {name}")

    def become_ready(self) -> None:
        """What a start does after the engine, and its end."""
        assert self.cache is not None
        if (thread := self.cache.after_ready()) is not None:
            thread.join(30)


def model_of(name: str) -> str:
    """The file of one compiled model."""
    return f"{AOT}/{name}/rank_0_0/model"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder that the containers share."""
    return tmp_path / "store"


def container(tmp_path: Path, store: Path, name: str) -> Container:
    """A container with an empty disk."""
    return Container(tmp_path / name, str(store))


def state_of(entry: Path) -> tuple[int, int]:
    """What changes when it is written again: another file is put in its place."""
    return entry.stat().st_ino, entry.stat().st_mtime_ns


def saved_once(tmp_path: Path, store: Path) -> Path:
    """The entry that a first container has saved."""
    first = container(tmp_path, store, "first")
    first.start()
    first.compile("aa")
    first.become_ready()
    (entry,) = store.iterdir()
    return entry


def test_second_container_finds_the_firsts_compiled_code(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved, restored, and each said in one line with bytes and seconds."""
    caplog.set_level(logging.INFO)
    saved_once(tmp_path, store)
    second = container(tmp_path, store, "second")
    second.start()
    assert second.files == {model_of("aa")}
    assert (second.root / model_of("aa")).read_text() == "code of aa"
    nothing, saved, restored = caplog.messages
    assert f"nothing at {store} for this model" in nothing
    assert f"saved to {store}: 1 files, 10 bytes in" in saved
    assert f"restored from {store}: 1 files, 10 bytes in" in restored


def test_entry_that_serves_is_left_alone(tmp_path: Path, store: Path) -> None:
    """A hundred replicas read it, and none writes it again."""
    entry = saved_once(tmp_path, store)
    before = state_of(entry)
    second = container(tmp_path, store, "second")
    second.start()
    second.compile("aa")  # what was there: vLLM takes it
    second.become_ready()
    assert state_of(entry) == before


def test_replica_that_compiled_beside_another_does_not_save_again(
    tmp_path: Path, store: Path
) -> None:
    """Both found nothing; the one that is ready first saves."""
    first, second = (container(tmp_path, store, name) for name in ("first", "second"))
    for replica in (first, second):
        replica.start()
        replica.compile("aa")
    first.become_ready()
    (entry,) = store.iterdir()
    before = state_of(entry)
    second.become_ready()
    assert state_of(entry) == before


def test_entry_that_did_not_serve_is_made_complete(tmp_path: Path, store: Path) -> None:
    """The model has changed under its name: vLLM compiled, and the next start finds that too."""
    saved_once(tmp_path, store)
    second = container(tmp_path, store, "second")
    second.start()
    second.compile("bb")
    second.become_ready()
    third = container(tmp_path, store, "third")
    third.start()
    assert third.files == {model_of("aa"), model_of("bb")}


def test_other_engine_arguments_find_nothing(tmp_path: Path, store: Path) -> None:
    """Nor do they harm what is there."""
    entry = saved_once(tmp_path, store)
    second = container(tmp_path, store, "second")
    second.start(max_model_len=4096)
    assert second.files == set()
    second.compile("cc")
    second.become_ready()
    assert len(list(store.iterdir())) == 2
    assert entry.is_file()


def test_restarted_process_reads_nothing(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is on its disk is what it would fetch."""
    entry = saved_once(tmp_path, store)
    entry.write_bytes(b"not to be read")
    again = container(tmp_path, store, "first")
    caplog.set_level(logging.INFO)
    again.start()
    assert "is filled already" in caplog.text
    assert again.files == {model_of("aa")}


def test_damaged_entry_is_a_warning_and_is_replaced(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start goes on with nothing of it, and heals it for the next one."""
    entry = saved_once(tmp_path, store)
    entry.write_bytes(entry.read_bytes()[:150])
    second = container(tmp_path, store, "second")
    second.start()
    assert second.files == set()
    assert "compile cache: NOT restored, LMI_CACHE_URI" in caplog.text
    second.compile("aa")
    second.become_ready()
    third = container(tmp_path, store, "third")
    third.start()
    assert third.files == {model_of("aa")}


def test_world_writable_folder_is_neither_read_nor_written(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says what to do; the start goes on."""
    entry = saved_once(tmp_path, store)
    entry.unlink()
    store.chmod(0o777)
    second = container(tmp_path, store, "second")
    second.start()
    (warning,) = caplog.messages  # at the start, before anything was compiled
    assert "NOT restored" in warning
    assert f"chmod o-w {store}" in warning
    second.compile("aa")
    second.become_ready()
    assert caplog.messages == [warning]
    assert list(store.iterdir()) == []


def test_store_that_is_away_is_a_warning(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither restoring nor saving raises."""
    store.write_text("a file where a folder should be")
    only = container(tmp_path, store, "only")
    only.start()
    only.compile("aa")
    only.become_ready()
    assert "NOT saved" in caplog.text


class SlowStore(FolderStore):
    """A store whose answer comes when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_answer = threading.Event()

    def fetch(self, name: str, scratch: Path) -> Path | None:
        """Wait, then look."""
        self.may_answer.wait(30)
        return super().fetch(name, scratch)


def test_slow_store_is_not_waited_for(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes after the time is left: the engine may be compiling by then."""
    saved_once(tmp_path, store)
    caplog.set_level(logging.INFO)
    caplog.clear()
    slow = SlowStore(store)
    parts = key_parts(MODEL, EngineArguments({}), {})
    cache = CompileCache(slow, tmp_path / "place" / "key", parts, {})
    (tmp_path / "place").mkdir()

    async def start() -> None:
        await cache.before_engine(0.05)
        slow.may_answer.set()  # the thread ends before the loop does

    asyncio.run(start())
    (line,) = caplog.messages
    assert "NOT restored" in line
    assert "0.05 s were not enough" in line
    assert not (tmp_path / "place" / "key").exists()


def test_start_that_compiled_nothing_saves_nothing(tmp_path: Path, store: Path) -> None:
    """An empty entry is of no use."""
    only = container(tmp_path, store, "only")
    only.start()
    only.become_ready()
    assert not store.exists()


def test_disk_that_cannot_be_written_is_a_warning(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the engine keeps its own folders."""
    (tmp_path / "file").write_text("")
    only = Container(tmp_path / "file", str(store))
    only.start()
    assert only.cache is None
    assert "compile cache: NOT used" in caplog.text


def test_folders_that_the_user_set_are_kept(tmp_path: Path, store: Path) -> None:
    """Of Inductor and Triton; vLLM's root is where our folder is made."""
    only = container(tmp_path, store, "only")
    only.start()
    assert only.cache is not None
    assert set(only.cache.exports) == {
        "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
    }  # fmt: skip
    assert only.root.is_relative_to(tmp_path / "only" / "lmi_vllm")
    assert only.root.parent.stat().st_mode & 0o777 == 0o700
    only.environ = {
        "TRITON_CACHE_DIR": "/mine",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1",
    }
    only.start()
    assert set(only.cache.exports) == {"VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"}


def test_secure_mode_has_no_cache(tmp_path: Path, store: Path) -> None:
    """The start is refused before; even if it were not, nothing would be read."""
    entry = saved_once(tmp_path, store)
    second = container(tmp_path, store, "second")
    second.environ = {"SAGEMAKER_SECURE_MODE": "true"}
    second.start()
    assert second.cache is None
    assert entry.is_file()
    assert not (tmp_path / "second").exists()


def test_scratch_folders_of_killed_processes_are_removed(tmp_path: Path, store: Path) -> None:
    """A day later; nothing else there is touched."""
    place = tmp_path / "only" / "lmi_vllm"
    old, young = place / ".save-old", place / ".restore-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    container(tmp_path, store, "only").start()
    assert not old.exists()
    assert young.exists()


def test_no_secret_of_the_url_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong with it."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    caplog.set_level(logging.INFO)
    only = Container(tmp_path / "disk", "s3://key:s3cret@bucket/x")
    only.environ = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "s3cret", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    only.start()
    only.compile("aa")
    only.become_ready()
    assert "NOT restored" in caplog.text
    assert "NOT saved" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("engine", ["scripted", "transformers"])
def test_an_engine_that_compiles_nothing_has_no_cache(
    tmp_path: Path, store: Path, engine: str
) -> None:
    """Only vLLM's compiled code is kept."""
    environ = {"LMI_CACHE_URI": str(store), "VLLM_CACHE_ROOT": str(tmp_path)}
    start = PlannedStart(
        engine, load_settings(environ), environ, MODEL, EngineArguments({}), SOURCES
    )
    assert compile_cache(start) is None
