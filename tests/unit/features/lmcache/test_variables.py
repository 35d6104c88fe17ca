"""LMCache: the file it reads, and the sizes made from the machine (docs/caches.md#lmcache)."""

import logging
import os
from pathlib import Path

import pytest

from lmi_vllm.config.properties import parse_properties
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.lmcache import variables
from lmi_vllm.features.lmcache.variables import Machine, lmcache_variables, measure_machine
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from tests.support.assembled import load_settings

GIB = 1 << 30


def sparse(path: Path, size: int) -> None:
    """Write a file of `size` bytes that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)


def exports(
    model: Path,
    properties: str,
    *,
    ranks: int = 1,
    machine: Machine = Machine(200 * GIB, 100 * GIB),  # noqa: B008 - frozen
    environ: dict[str, str] | None = None,
) -> dict[str, str]:
    """The variables for a model directory with these options."""
    settings = load_settings({}, extra_properties=parse_properties(properties))
    artifacts = ModelArtifacts("m", str(model), str(model), directory=model)
    arguments = EngineArguments({"tensor_parallel_size": ranks})
    return lmcache_variables(settings, artifacts, arguments, environ or {}, machine)


def test_lmcache_is_silent_by_default(tmp_path: Path) -> None:
    """Nothing asked, nothing exported."""
    assert exports(tmp_path, "option.dtype=fp16") == {}
    assert exports(tmp_path, "option.lmcache_auto_config=false") == {}


@pytest.mark.parametrize("written", ["lmcache.yaml", "{folder}/lmcache.yaml"])
def test_lmcache_file_counts_from_the_model_directory(tmp_path: Path, written: str) -> None:
    """Relative or absolute, the library gets the whole path."""
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 256\n")
    line = f"option.lmcache_config_file={written.format(folder=tmp_path)}"
    assert exports(tmp_path, line) == {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml")}


def test_lmcache_file_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    """The text names the option, its place and the path that was looked for."""
    with pytest.raises(ConfigurationError, match="lmcache_config_file=no") as caught:
        exports(tmp_path, "option.lmcache_config_file=no.yaml")
    assert str(tmp_path / "no.yaml") in caught.value.text


def test_lmcache_sizes_of_the_specification(tmp_path: Path) -> None:
    """Its example: 200 GB available, a model of 20, four ranks: 40 each; disk 100: (100-40)/4."""
    sparse(tmp_path / "a.safetensors", 12 * GIB)
    sparse(tmp_path / "b.safetensors", 8 * GIB)
    sparse(tmp_path / "other.bin", 500 * GIB)  # not counted beside safetensors
    assert exports(tmp_path, "option.lmcache_auto_config=true", ranks=4) == {
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "40",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "15",
        "LMCACHE_LOCAL_DISK": "file:///tmp/lmcache/",
        "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "true",
        "PYTHONHASHSEED": "0",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
    }


@pytest.mark.parametrize(
    ("memory", "model", "expected"),
    [(100, 2, "80"), (100, 30, "40"), (100, 80, "0"), (0, 1, "0"), (7, 1, "5")],
    ids=["a fifth", "two models", "too small", "unreadable", "rounded down"],
)
def test_lmcache_size_keeps_room(tmp_path: Path, memory: int, model: int, expected: str) -> None:
    """Two models or a fifth of the memory stay free, and never less than nothing is left."""
    sparse(tmp_path / "x.bin", model * GIB)
    machine = Machine(memory * GIB, 0)
    found = exports(tmp_path, "option.lmcache_auto_config=true", machine=machine)
    assert found["LMCACHE_MAX_LOCAL_CPU_SIZE"] == expected
    assert found["LMCACHE_MAX_LOCAL_DISK_SIZE"] == "0"


def test_lmcache_without_model_size_ends_the_start(tmp_path: Path) -> None:
    """Sizes cannot be guessed: the text names the option and the way out."""
    with pytest.raises(ConfigurationError, match=r"lmcache_auto_config.*lmcache_config_file"):
        exports(tmp_path, "option.lmcache_auto_config=true")


def test_lmcache_overwritten_variables_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A value of the user's that changes is a warning; an equal one is not."""
    sparse(tmp_path / "x.bin", GIB)
    environ = {"LMCACHE_LOCAL_DISK": "file:///data/", "PYTHONHASHSEED": "0"}
    with caplog.at_level(logging.WARNING):
        exports(tmp_path, "option.lmcache_auto_config=true", environ=environ)
    (record,) = caplog.records
    assert "LMCACHE_LOCAL_DISK=file:///data/" in record.getMessage()


def test_lmcache_measures_this_machine() -> None:
    """Memory and the disk of /tmp are read for real."""
    machine = measure_machine()
    assert machine.memory > 0
    assert machine.disk > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")
def test_lmcache_leaves_a_folder_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library reads what lies there."""
    folder = tmp_path / "lmcache"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    monkeypatch.setattr(variables, "CACHE_FOLDER", folder)
    found = variables._automatic(1, 1, Machine(1 << 34, 1 << 34))
    assert found["LMCACHE_LOCAL_DISK"] == f"file://{folder}-{os.geteuid()}/"
