"""Archives as adapters: unpacked once into the cache, bounded, and refused as folders are."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from lmi_vllm.adapters import source
from lmi_vllm.adapters.loads import version_of
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.server.adapter_start import adapter_policy
from tests.support.adapter_files import copy_adapter
from tests.support.assembled import CONFIGURATION, AdapterSources, load_settings
from tests.support.s3_server import tar_gz, zip_file


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A sound adapter."""
    return copy_adapter(tmp_path / "adapter")


def resolve(src: object, **environ: str) -> str:
    """Resolve a source under an environment."""
    return AdapterSources(
        environ, adapter_policy(load_settings(environ), CONFIGURATION.security)
    ).resolve(str(src))


def packed(folder: Path, target: Path, arcname: str) -> Path:
    """Return a tar.gz of a folder."""
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, arcname=arcname)
    return target


@pytest.mark.parametrize("arcname", [".", "french"])
def test_archive_is_unpacked_once(adapter: Path, tmp_path: Path, arcname: str) -> None:
    """A tar.gz as inference components bring it becomes a folder of the cache."""
    archive = packed(adapter, tmp_path / "french.tar.gz", arcname)
    cache = str(tmp_path / "cache")
    folder = resolve(archive, SERVING_DOWNLOAD_DIR=cache)
    assert (Path(folder) / "adapter_config.json").is_file()
    assert folder.startswith(cache)
    assert resolve(archive, SERVING_DOWNLOAD_DIR=cache) == folder
    assert not list(Path(cache).rglob(".unpacking-*"))


@pytest.mark.parametrize("name", ["fr.tgz", "fr.tar", "FR.TAR.GZ", "fr.zip"])
def test_archive_may_have_folders_beside_the_adapters(
    adapter: Path, tmp_path: Path, name: str
) -> None:
    """MacOS adds a folder to archives; a training run has its logs."""
    files = {f"run/fr/{file.name}": file.read_bytes() for file in adapter.iterdir()}
    files |= {"__MACOSX/run/fr/adapter_config.json": b"?", "logs/x.txt": b"x"}
    archive = tmp_path / name
    data = zip_file(files) if name.endswith(".zip") else tar_gz(files)
    archive.write_bytes(gzip.decompress(data) if name.endswith(".tar") else data)
    folder = Path(resolve(archive, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache")))
    assert folder.parts[-2:] == ("run", "fr")


def test_trainers_output_is_its_final_adapter(adapter: Path, tmp_path: Path) -> None:
    """`tar czf out.tgz out`: the checkpoints below the adapter are not meant."""
    for name in ("checkpoint-10", "checkpoint-20"):
        copy_adapter(adapter / name)
    archive = packed(adapter, tmp_path / "out.tgz", "out")
    assert Path(resolve(archive, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache"))).name == "out"


def test_two_adapters_in_an_archive_are_refused_with_advice(adapter: Path, tmp_path: Path) -> None:
    """No source names a folder inside an archive."""
    for name in ("a", "b"):
        copy_adapter(tmp_path / "run" / name, adapter)
    archive = packed(tmp_path / "run", tmp_path / "run.tgz", "run")
    with pytest.raises(AdapterRefusedError, match=r"run/a/, run/b/; pack one of them alone"):
        resolve(archive, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache"))


def test_update_of_an_archive_finds_what_was_packed_again(adapter: Path, tmp_path: Path) -> None:
    """Its content has another folder then, and so another version."""
    cache = str(tmp_path / "cache")
    archive = packed(adapter, tmp_path / "fr.tgz", "fr")
    first = version_of(resolve(archive, SERVING_DOWNLOAD_DIR=cache))
    assert version_of(resolve(archive, SERVING_DOWNLOAD_DIR=cache)) == first
    packed(adapter, archive, "other")
    assert version_of(resolve(archive, SERVING_DOWNLOAD_DIR=cache)) != first


def test_archive_of_another_kind_is_named(tmp_path: Path) -> None:
    """It was said to be no path."""
    (tmp_path / "fr.tar.xz").write_bytes(b"x")
    with pytest.raises(AdapterRefusedError, match="of a kind that is not unpacked"):
        resolve(tmp_path / "fr.tar.xz")


@pytest.mark.parametrize("kind", ["outside", "absolute", "link", "device"])
def test_archive_entry_outside_of_its_folder_is_refused(tmp_path: Path, kind: str) -> None:
    """Entries that leave the directory, links and devices are refused, and leave nothing."""
    archive = tmp_path / "bad.tar.gz"
    entry = tarfile.TarInfo({"outside": "../x", "absolute": "/tmp/x"}.get(kind, "x"))
    entry.type = {"link": tarfile.SYMTYPE, "device": tarfile.CHRTYPE}.get(kind, tarfile.REGTYPE)
    entry.linkname = "/etc/passwd"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(entry, io.BytesIO(b""))
    with pytest.raises(AdapterRefusedError):
        resolve(archive, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["tar.gz", "zip"])
def test_archive_unpacks_to_no_more_than_allowed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte may be a gigabyte of zeros; the number of files is bounded, too."""
    assert source.MAX_FILES == 10_000  # of which seconds are spent on making them
    monkeypatch.setattr(source, "MAX_FILES", 100)
    zeros, many = tmp_path / f"zeros.{kind}", tmp_path / f"many.{kind}"
    pack = tar_gz if kind == "tar.gz" else zip_file
    zeros.write_bytes(pack({"zeros": bytes(1 << 20)}))
    many.write_bytes(pack({str(number): b"" for number in range(101)}))
    for archive in (zeros, many):
        with pytest.raises(AdapterRefusedError, match=r"more than|at most 1000000 are taken"):
            resolve(archive, LMI_ADAPTER_MAX_SIZE="1000000", SERVING_DOWNLOAD_DIR=str(tmp_path))
    assert not list(tmp_path.rglob("100"))


@pytest.mark.parametrize("environ", [{}, {"LMI_CUSTOM_CODE": "roots"}, {"LMI_CUSTOM_CODE": "all"}])
def test_code_in_an_archive_needs_roots_too(tmp_path: Path, environ: dict[str, str]) -> None:
    """It is unpacked before its files are looked at; the folder's rules are the archive's."""
    folder = copy_adapter(tmp_path / "code")
    (folder / "model.py").write_text("")
    archive = packed(folder, tmp_path / "code.tar.gz", "code")
    with pytest.raises(AdapterRefusedError, match="LMI_CUSTOM_CODE=roots and from below"):
        resolve(archive, SERVING_DOWNLOAD_DIR=str(tmp_path / "cache"), **environ)
