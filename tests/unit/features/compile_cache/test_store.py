"""Stores of cache entries: whole or not at all, and never from a world-writable folder."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi_vllm.errors import DownloadError
from lmi_vllm.features.compile_cache.archive import UnusableEntryError
from lmi_vllm.features.compile_cache.store import (
    ABANDONED_SECONDS,
    CompileCacheSettings,
    FolderStore,
    open_cache_store,
)
from lmi_vllm.sources.base import UnreachableError
from tests.support.assembled import SOURCES, load_settings
from tests.support.s3_server import BUCKET, Refusal, S3Server

NAME = "0123.tar.gz"


def names(folder: Path) -> list[str]:
    """What is in it."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An entry to be stored."""
    path = tmp_path / "made.tar.gz"
    path.write_bytes(b"entry" * 1000)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a store may be made."""
    return tmp_path / "volume" / "caches"


def test_folder_keeps_and_gives_back(tmp_path: Path, folder: Path, archive: Path) -> None:
    """The folder is made with the first entry; before it there is none."""
    store = open_cache_store(str(folder), {}, SOURCES)
    assert store.fetch(NAME, tmp_path) is None
    assert not store.has(NAME)
    store.put(NAME, archive)
    assert store.has(NAME)
    found = store.fetch(NAME, tmp_path)
    assert found is not None
    assert found.read_bytes() == archive.read_bytes()
    assert names(folder) == [NAME]


def test_folder_may_be_a_file_url(folder: Path) -> None:
    """As with HF_MODEL_ID."""
    assert open_cache_store(f"file://{folder}", {}, SOURCES).shown == str(folder)


def test_folder_takes_many_savers_at_once(tmp_path: Path, folder: Path) -> None:
    """The last one wins, and at every moment the entry is one of them, whole."""
    bodies = [bytes([number]) * 3_000_000 for number in range(8)]
    for number, body in enumerate(bodies):
        (tmp_path / f"{number}").write_bytes(body)
    store = FolderStore(folder)
    with ThreadPoolExecutor(8) as threads:
        saves = [threads.submit(store.put, NAME, tmp_path / f"{n}") for n in range(8)]
        while not all(save.done() for save in saves):
            assert not store.has(NAME) or (folder / NAME).read_bytes() in bodies
    assert [save.result() for save in saves] == [None] * 8
    assert names(folder) == [NAME]


def test_folder_leaves_nothing_of_a_save_that_failed(tmp_path: Path, folder: Path) -> None:
    """Nor an entry that is half there."""
    with pytest.raises(FileNotFoundError):
        FolderStore(folder).put(NAME, tmp_path / "gone")
    assert names(folder) == []


def test_folder_removes_files_of_killed_savers(folder: Path, archive: Path) -> None:
    """After a day; a younger one may still be written."""
    folder.mkdir(parents=True)
    old, young = folder / f"{NAME}.aa.partial", folder / f"{NAME}.bb.partial"
    for path, age in ((old, ABANDONED_SECONDS + 60), (young, 60)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    FolderStore(folder).put(NAME, archive)
    assert names(folder) == [NAME, young.name]


UNSAFE = {"folder": (0o777, 0o644), "sticky folder": (0o1777, 0o644), "entry": (0o755, 0o666)}


@pytest.mark.parametrize("modes", UNSAFE.values(), ids=UNSAFE)
def test_world_writable_folder_is_not_read(
    tmp_path: Path, folder: Path, archive: Path, modes: tuple[int, int]
) -> None:
    """Compiled code is code; the text names the place and the remedy."""
    store = FolderStore(folder)
    store.put(NAME, archive)
    folder.chmod(modes[0])
    (folder / NAME).chmod(modes[1])
    with pytest.raises(UnusableEntryError, match=r"is world-writable .* chmod o-w"):
        store.fetch(NAME, tmp_path)


def test_world_writable_folder_is_not_written(folder: Path, archive: Path) -> None:
    """No other user may read it there."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(UnusableEntryError, match="is world-writable"):
        FolderStore(folder).put(NAME, archive)
    assert names(folder) == []


def test_folder_below_a_world_writable_one_is_not_read(
    tmp_path: Path, folder: Path, archive: Path
) -> None:
    """A user who can rename the folder can replace it; the sticky bit of /tmp prevents that."""
    store = FolderStore(folder)
    store.put(NAME, archive)
    folder.parent.chmod(0o1777)
    assert store.fetch(NAME, tmp_path) is not None
    folder.parent.chmod(0o777)
    with pytest.raises(UnusableEntryError, match="is world-writable"):
        store.fetch(NAME, tmp_path)


def test_folder_of_a_group_is_read(tmp_path: Path, folder: Path, archive: Path) -> None:
    """Kubernetes makes volumes writable for a group (fsGroup)."""
    store = FolderStore(folder)
    store.put(NAME, archive)
    folder.chmod(0o2775)
    (folder / NAME).chmod(0o664)
    assert store.fetch(NAME, tmp_path) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_folder_or_entry_of_another_user_is_not_read(
    tmp_path: Path, folder: Path, archive: Path
) -> None:
    """Who owns it can change it."""
    store = FolderStore(folder)
    store.put(NAME, archive)
    for path in (folder / NAME, folder):
        os.chown(path, 12345, -1)
        with pytest.raises(UnusableEntryError, match="belongs to user 12345"):
            store.fetch(NAME, tmp_path)
        os.chown(path, 0, -1)
    assert store.fetch(NAME, tmp_path) is not None


def test_entry_that_is_a_link_is_not_read(tmp_path: Path, folder: Path, archive: Path) -> None:
    """It may lead to a world-writable folder."""
    folder.mkdir(parents=True)
    (folder / NAME).symlink_to(archive)
    with pytest.raises(UnusableEntryError, match="is a link"):
        FolderStore(folder).fetch(NAME, tmp_path)


@pytest.fixture
def bucket(running_store: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, empty and without faults."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running_store.reset()
    return running_store


def s3_environ(bucket: S3Server, *, writes: bool = False) -> dict[str, str]:
    """What leads to the server; its proxy only reads."""
    backend = "http://{}:{}".format(*bucket.backend)
    return {**bucket.environ, **({"AWS_ENDPOINT_URL": backend} if writes else {})}


def test_s3_keeps_and_gives_back(bucket: S3Server, tmp_path: Path, archive: Path) -> None:
    """Below the prefix, under the entry's name."""
    store = open_cache_store(f"s3://{BUCKET}/caches", s3_environ(bucket), SOURCES)
    assert store.fetch(NAME, tmp_path) is None
    assert not store.has(NAME)
    open_cache_store(f"s3://{BUCKET}/caches", s3_environ(bucket, writes=True), SOURCES).put(
        NAME, archive
    )
    assert store.has(NAME)
    found = store.fetch(NAME, tmp_path)
    assert found is not None
    assert found.read_bytes() == archive.read_bytes()
    listed = bucket.client.list_objects_v2(Bucket=BUCKET)["Contents"]
    assert [entry["Key"] for entry in listed] == [f"caches/{NAME}"]


def test_s3_that_refuses_says_so(bucket: S3Server, tmp_path: Path) -> None:
    """No permission is another thing than no entry."""
    bucket.refusal = Refusal(403, "AccessDenied")
    with pytest.raises(DownloadError, match="is denied"):
        open_cache_store(f"s3://{BUCKET}/caches", s3_environ(bucket), SOURCES).fetch(NAME, tmp_path)


def test_s3_without_answer_is_unreachable(tmp_path: Path) -> None:
    """A store that is away is no store without the entry."""
    environ = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.raises(UnreachableError):
        open_cache_store(f"s3://{BUCKET}/caches", environ, SOURCES).has(NAME)


def test_s3_transfer_that_breaks_is_no_entry(
    bucket: S3Server, tmp_path: Path, archive: Path
) -> None:
    """A part of an entry is never returned."""
    open_cache_store(f"s3://{BUCKET}/c", s3_environ(bucket, writes=True), SOURCES).put(
        NAME, archive
    )
    bucket.cuts_left = 99
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(Exception) as caught:  # noqa: PT011 (one of three, by where it broke)
        open_cache_store(f"s3://{BUCKET}/c", s3_environ(bucket), SOURCES).fetch(NAME, scratch)
    assert type(caught.value).__module__.startswith("lmi_vllm.")


GOOD = ("/mnt/caches", "caches", "file:///mnt/caches", "s3://bucket", "s3://bucket/a/b/")


@pytest.mark.parametrize("uri", GOOD)
def test_setting_takes_folders_and_prefixes(uri: str) -> None:
    """As LMI_CACHE_URI."""
    settings = load_settings({"LMI_CACHE_URI": uri})
    assert settings.feature(CompileCacheSettings).lmi_cache_uri == uri
    assert not settings.errors


@pytest.mark.parametrize("uri", ["http://host/x", "ftp://bucket/x", "s3://", "gs://", "file://"])
def test_setting_refuses_other_places(uri: str) -> None:
    """The error names the variable and what is allowed."""
    (error,) = load_settings({"LMI_CACHE_URI": uri}).errors
    assert "LMI_CACHE_URI" in error
    assert "s3://bucket/prefix" in error
