"""A cache entry is used whole and as it was made, or not at all."""

import gzip
from pathlib import Path

import pytest

from lmi_vllm.features.compile_cache.archive import (
    LIMITS,
    MANIFEST,
    Manifest,
    UnusableEntryError,
    caches_of,
    files_in,
    move_in,
    pack,
    read_manifest,
    unpack,
)
from lmi_vllm.sources.base import Limits
from tests.support.s3_server import tar_gz

KEY = "0123abcd"
AOT = "vllm/torch_compile_cache/torch_aot_compile"
FILES = {
    f"{AOT}/aa11/rank_0_0/model": b"compiled" * 1000,
    f"{AOT}/aa11/inductor_cache/x/y.so": b"\x7fELF",
    "vllm/torch_compile_cache/bb22/rank_0_0/cache.py": b"{}",
    "vllm/modelinfos/llama.json": b"{}",
    "triton/k/kernel.cubin": b"",
}


def filled(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    """A folder with these files."""
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def packed(folder: Path) -> Path:
    """An entry of FILES."""
    archive = folder / f"{KEY}.tar.gz"
    pack(filled(folder / "made"), archive, KEY, {"why": "test"})
    return archive


def refusal(archive: Path, key: str = KEY, limits: Limits = LIMITS) -> str:
    """Why an entry is not used."""
    with pytest.raises(UnusableEntryError) as caught:
        unpack(archive, archive.parent / "ready", key, "the entry", limits)
    return str(caught.value)


def test_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every file, and the manifest says what is there."""
    manifest = unpack(packed(tmp_path), tmp_path / "ready", KEY, "the entry")
    assert {n: p.read_bytes() for n, p in files_in(tmp_path / "ready").items()} == FILES
    assert manifest == read_manifest(tmp_path / "ready")
    assert manifest.total_bytes == sum(map(len, FILES.values()))
    assert manifest.caches == {
        f"{AOT}/aa11", "vllm/torch_compile_cache/bb22", "vllm/modelinfos/llama.json",
    }  # fmt: skip


def test_entry_leaves_out_files_of_no_cache(tmp_path: Path) -> None:
    """Links lead anywhere; locks, scratch files and how GPUs are joined are this machine's own."""
    place = filled(tmp_path / "made", {"vllm/modelinfos/a.json": b"{}"})
    others = ("vllm/gpu_p2p_access_cache_for_0.json", "vllm/assets/a.jpg", "triton/a.lock", "x.tmp")
    filled(place, dict.fromkeys((*others, "inductor/locks/a"), b"1"))
    (place / "link").symlink_to("/etc/passwd")
    (place / "folder").symlink_to("/etc")
    manifest = pack(place, tmp_path / "e.tar.gz", KEY, {})
    assert set(manifest.files) == {"vllm/modelinfos/a.json"}


def test_entry_cut_short_is_refused(tmp_path: Path) -> None:
    """Wherever the cut is: in the compressed bytes, or between two members."""
    archive = packed(tmp_path)
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refusal(archive)
    archive.write_bytes(tar_gz(FILES))
    (tmp_path / "ready").rename(tmp_path / "earlier")
    assert "no manifest" in refusal(archive)


def test_entry_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    """An HTML page, or nothing."""
    archive = tmp_path / f"{KEY}.tar.gz"
    for number, body in enumerate((b"<html>", b"", gzip.compress(b""))):
        archive.write_bytes(body)
        assert refusal(archive)
        (tmp_path / "ready").rename(tmp_path / f"earlier-{number}")


def test_entry_with_one_altered_byte_is_refused(tmp_path: Path) -> None:
    """Also where the archive's own sums were made again."""
    manifest = pack(filled(tmp_path / "made"), tmp_path / "x.tar.gz", KEY, {})
    altered = {**FILES, f"{AOT}/aa11/inductor_cache/x/y.so": b"\x7fELG"}
    archive = tmp_path / f"{KEY}.tar.gz"
    archive.write_bytes(tar_gz({**altered, MANIFEST: manifest.encoded()}))
    assert "y.so in it is not what its manifest says" in refusal(archive)


def test_entry_with_more_or_less_than_its_manifest_is_refused(tmp_path: Path) -> None:
    """No file was added or removed."""
    manifest = pack(filled(tmp_path / "made"), tmp_path / "x.tar.gz", KEY, {})
    archive = tmp_path / f"{KEY}.tar.gz"
    archive.write_bytes(tar_gz({**FILES, "vllm/more.py": b"1", MANIFEST: manifest.encoded()}))
    assert "does not hold the files" in refusal(archive)


def test_entry_of_another_key_is_refused(tmp_path: Path) -> None:
    """Renaming an entry does not make it another model's."""
    assert f"made for key {KEY}" in refusal(packed(tmp_path), "another")


def test_entry_of_another_format_is_refused(tmp_path: Path) -> None:
    """A later release may write otherwise."""
    body = Manifest(KEY, {}, {}).encoded().replace(b'"format": 1', b'"format": 2')
    archive = tmp_path / f"{KEY}.tar.gz"
    archive.write_bytes(tar_gz({MANIFEST: body}))
    assert "no manifest" in refusal(archive)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "vllm/../../out"])
def test_entry_that_would_leave_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    """The guards are those of every archive."""
    archive = tmp_path / f"{KEY}.tar.gz"
    archive.write_bytes(tar_gz({name: b"1"}))
    assert "would leave" in refusal(archive)


def test_entry_that_is_too_large_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """A few bytes that unpack to gigabytes, or to a million files, fill no disk."""
    archive = tmp_path / f"{KEY}.tar.gz"
    archive.write_bytes(tar_gz({"a": bytes(500), "bomb": bytes(100_000)}))
    limits = Limits(files=9, total_bytes=50_000)
    assert "'bomb' is more than may be unpacked" in refusal(archive, limits=limits)
    assert not (tmp_path / "ready" / "bomb").exists()
    archive.write_bytes(tar_gz({f"f{number}": b"" for number in range(20)}))
    (tmp_path / "ready").rename(tmp_path / "earlier")
    assert "'f9' is more than may be unpacked" in refusal(archive, limits=limits)


def test_too_much_is_not_packed(tmp_path: Path) -> None:
    """What no start would take is not sent to the store."""
    limits = Limits(files=9, total_bytes=100)
    with pytest.raises(UnusableEntryError, match="more than an entry may hold"):
        pack(filled(tmp_path / "made"), tmp_path / "e.tar.gz", KEY, {}, limits)
    assert not (tmp_path / "e.tar.gz").exists()


def test_move_in_keeps_existing_files(tmp_path: Path) -> None:
    """A second server may be using the folder: files are replaced one by one, none is removed."""
    place = filled(tmp_path / "place", {"vllm/modelinfos/own.json": b"own"})
    unpack(packed(tmp_path), tmp_path / "ready", KEY, "the entry")
    move_in(tmp_path / "ready", place)
    assert (place / "vllm/modelinfos/own.json").read_bytes() == b"own"
    found = read_manifest(place)
    assert found is not None
    assert set(found.files) == set(FILES)
    assert {name for name in files_in(place) if name in FILES} == set(FILES)
    assert not (tmp_path / "ready").exists()


def test_caches_are_the_folders_that_vllm_names_by_hash() -> None:
    """One more file in a cache is no new cache; one more hash is."""
    one = caches_of({f"{AOT}/aa/x": 1, f"{AOT}/aa/y": 1, "triton/z": 1})
    assert one == {f"{AOT}/aa"}
    assert caches_of({f"{AOT}/aa/x": 1, "vllm/modelinfos/a.json": 1}) > one


def test_files_that_vanish_are_no_error(tmp_path: Path) -> None:
    """The compiler may remove files at any time."""
    assert files_in(tmp_path / "gone") == {}
