"""Archives are unpacked safely: what would leave the directory is refused, damage is named."""

import gzip
import io
import random
import stat
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.extract import MAX_LIST_BYTES, extract_archive
from tests.support.s3_server import tar_gz, zip_file


def tar_with(entry: tarfile.TarInfo) -> bytes:
    """Return a .tar.gz with one entry that has no content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(entry)
    return buffer.getvalue()


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    """Return an entry `x` of `kind` that points to `target`."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.linkname = kind, target
    return entry


def zip_with_link() -> bytes:
    """Return a .zip whose entry is a symbolic link."""
    buffer = io.BytesIO()
    info = zipfile.ZipInfo("x")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


# A header with a field of 65,535 bytes, and no valid block behind it.
GZIP_OF_NOTHING = b"\x1f\x8b\x08\x04" + b"\0" * 6 + b"\xff" * 102
REFUSED = [
    pytest.param("a.tar.gz", tar_gz({"../x": b"1"}), "would leave", id="tar-parent"),
    pytest.param("a.tar.gz", tar_gz({"/tmp/x": b"1"}), "would leave", id="tar-absolute"),
    pytest.param("a.tar.gz", tar_with(link(tarfile.SYMTYPE, "/")), "is a link", id="tar-symlink"),
    pytest.param("a.tar.gz", tar_with(link(tarfile.LNKTYPE, "y")), "is a link", id="tar-hardlink"),
    pytest.param("a.tar.gz", tar_with(link(tarfile.CHRTYPE, "")), "device", id="tar-device"),
    pytest.param("a.zip", zip_file({"a/../../x": b"1"}), "would leave", id="zip-parent"),
    pytest.param("a.zip", zip_with_link(), "is a link", id="zip-symlink"),
    pytest.param("a.zip", b"not a zip", "damaged", id="zip-damaged"),
    pytest.param("a.tgz", b"not a tar", "damaged", id="tar-damaged"),
    pytest.param("a.tgz", tar_gz({"x": b"1" * 9999})[:-30], "damaged", id="tar-truncated"),
    pytest.param("a.tgz", GZIP_OF_NOTHING, "damaged", id="tar-damaged-field"),
]


@pytest.mark.parametrize(("name", "body", "words"), REFUSED)
def test_unsafe_or_damaged_archive_is_refused(
    name: str, body: bytes, words: str, tmp_path: Path
) -> None:
    """The text names source, entry and reason, and nothing lands outside."""
    (tmp_path / name).write_bytes(body)
    with pytest.raises(DownloadError, match=words) as caught:
        extract_archive(tmp_path / name, tmp_path / "out", "s3://b/a")
    assert "s3://b/a" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "out"]


def test_extracted_files_are_reported(tmp_path: Path) -> None:
    """Names and sizes of all files come back, directories are made."""
    (tmp_path / "a.zip").write_bytes(zip_file({"x/y.txt": b"123", "z/": b""}))
    sizes = extract_archive(tmp_path / "a.zip", tmp_path / "out", "a.zip")
    assert sizes == {"x/y.txt": 3}
    assert (tmp_path / "out/z").is_dir()


def test_a_long_list_of_a_zip_s_entries_is_not_read(tmp_path: Path) -> None:
    """It would be in memory whole, with an object for each entry, before any is counted."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(MAX_LIST_BYTES // 60_000 + 1):
            archive.writestr(zipfile.ZipInfo(f"{number:060000d}"), b"")
    (tmp_path / "a.zip").write_bytes(buffer.getvalue())
    with pytest.raises(DownloadError, match=r"a\.zip is not extracted: its list of entries has"):
        extract_archive(tmp_path / "a.zip", tmp_path / "out", "a.zip")
    assert not any((tmp_path / "out").iterdir())


def headers(kind: bytes, size: int) -> tarfile.TarInfo:
    """Return an entry of `kind` with so many bytes: a name, or a list of names and values."""
    entry = tarfile.TarInfo("x")
    entry.type, entry.size = kind, size
    return entry


BETWEEN = {
    "long name": (tarfile.GNUTYPE_LONGNAME, 8 << 20),
    "long link": (tarfile.GNUTYPE_LONGLINK, 8 << 20),
    "pax": (tarfile.XHDTYPE, 8 << 20),
    "pax for all": (tarfile.XGLTYPE, 8 << 20),
}


@pytest.mark.parametrize(("kind", "size"), BETWEEN.values(), ids=BETWEEN)
def test_long_names_of_a_tar_are_not_read(kind: bytes, size: int, tmp_path: Path) -> None:
    """0.5 MB with a name of 512 MiB took 3.6 GB, and 17 s of the interpreter's lock."""
    buffer = io.BytesIO()
    with gzip.open(buffer, "wb") as packed:
        packed.write(headers(kind, size).tobuf(tarfile.GNU_FORMAT) + bytes(size + 10240))
    (tmp_path / "a.tar.gz").write_bytes(buffer.getvalue())
    tracemalloc.start()
    try:
        with pytest.raises(DownloadError, match="more than 1048576 bytes of names and lists"):
            extract_archive(tmp_path / "a.tar.gz", tmp_path / "out", "a.tar.gz")
        assert tracemalloc.get_traced_memory()[1] < 7 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("zipped", [True, False])
def test_names_and_files_of_any_usual_size_are_unpacked(tmp_path: Path, *, zipped: bool) -> None:
    """Long names, large files after them, and archives that were zipped in parts."""
    contents = {"d/" + "n" * 200: b"1" * (5 << 20), "y": b"", "z" * 120: random.randbytes(3 << 20)}
    body = tar_gz(contents)
    plain = gzip.decompress(body)
    half = len(plain) // 2
    parts = gzip.compress(plain[:half]) + gzip.compress(plain[half:])
    (tmp_path / "a.tar.gz").write_bytes(parts if zipped else plain)
    extract_archive(tmp_path / "a.tar.gz", tmp_path / "out", "a.tar.gz")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in contents} == contents
