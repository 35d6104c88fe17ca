"""Adapters fetched from S3 by the model downloader, on loopback."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from lmi_vllm.adapters import source
from lmi_vllm.adapters.source import AdapterPolicy
from lmi_vllm.errors import AdapterRefusedError, DownloadError
from lmi_vllm.features.object_stores.s3 import S3Store
from lmi_vllm.features.object_stores.s3_bucket import S3Bucket
from tests.support.adapter_files import CAPITALS
from tests.support.assembled import AdapterSources
from tests.support.s3_server import BUCKET, S3Server, tar_gz

FILES = {file.name: file.read_bytes() for file in CAPITALS.iterdir() if file.is_file()}


def names_in(folder: str) -> set[str]:
    """Return the names of all files of a folder."""
    return {file.name for file in Path(folder).iterdir()}


def test_s3_prefix_and_archive_are_fetched(
    empty_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix and a tar.gz become checked folders; a model.py in one needs LMI_CUSTOM_CODE."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    empty_store.put({f"fr/{name}": body for name, body in FILES.items()})
    empty_store.put({f"code/{name}": body for name, body in {**FILES, "model.py": b"#"}.items()})
    empty_store.put({"fr.tar.gz": tar_gz(FILES), "bad/adapter_config.json": b"{"})
    empty_store.put({"bad/adapter_model.safetensors": b""})
    environ = {
        **empty_store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": "boto3",
    }
    sources = AdapterSources(environ)
    for src in (f"s3://{BUCKET}/fr/", f"s3://{BUCKET}/fr.tar.gz"):
        assert set(FILES) <= names_in(sources.resolve(src))
    with pytest.raises(AdapterRefusedError, match="LMI_CUSTOM_CODE=all"):
        sources.resolve(f"s3://{BUCKET}/code/")
    assert AdapterSources(environ, AdapterPolicy(code="all")).resolve(f"s3://{BUCKET}/code/")
    with pytest.raises(AdapterRefusedError, match="not JSON"):
        sources.resolve(f"s3://{BUCKET}/bad/")
    with pytest.raises(AdapterRefusedError):
        sources.resolve(f"s3://{BUCKET}/nothing/")


def test_s3_source_is_bounded_before_it_is_fetched(
    empty_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and objects of a prefix, and what an archive there unpacks to; nothing was moved."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    empty_store.put({f"fr/{name}": body for name, body in FILES.items()})
    empty_store.put({f"many/{number}": b"" for number in range(5)})
    empty_store.put({"bomb.tar.gz": tar_gz({**FILES, "zeros": bytes(1 << 20)})})
    environ = {
        **empty_store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": "boto3",
    }
    small = AdapterSources(environ, AdapterPolicy(max_bytes=1000))
    with pytest.raises(AdapterRefusedError, match=r"at most 1000 are taken \(LMI_ADAPTER_MAX_SIZE"):
        small.resolve(f"s3://{BUCKET}/fr/")
    assert not empty_store.objects_sent
    packed = AdapterSources(environ, AdapterPolicy(max_bytes=1 << 20))
    with pytest.raises(AdapterRefusedError, match=r"more than may be unpacked \(LMI_ADAPTER_MAX"):
        packed.resolve(f"s3://{BUCKET}/bomb.tar.gz")
    monkeypatch.setattr(source, "MAX_FILES", 4)
    with pytest.raises(AdapterRefusedError, match="holds more than 4 objects"):
        small.resolve(f"s3://{BUCKET}/many/")


def test_endless_listing_is_not_read_to_its_end() -> None:
    """A million objects are a thousand pages: two are read."""
    pages = ({"Contents": [{"Key": "a/", "Size": 0, "ETag": ""}] * 1000} for _ in range(1000))
    client = MagicMock()
    client.get_paginator.return_value.paginate.return_value = pages
    bucket = S3Bucket(BUCKET, {})
    bucket.__dict__["client"] = client
    store = S3Store(f"s3://{BUCKET}/a/", {}, bucket)
    with pytest.raises(DownloadError, match="more than 1500 objects"):
        store.list_objects(1500)
    assert len(list(pages)) == 998
