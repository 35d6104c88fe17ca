"""Models in Google's and Azure's stores, fetched by obstore from emulators on loopback."""

import argparse
import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.errors import DownloadError
from lmi_vllm.features import transfer
from lmi_vllm.features.adapters_state.shared_object import (
    ReplicaReport,
    ReplicatedAdapters,
    StateObject,
)
from lmi_vllm.features.object_stores import cloud_bucket, cloud_transfer, location
from lmi_vllm.features.validate import command as validate
from lmi_vllm.sources.base import DownloadProgress, ObjectChangedError
from tests.support.assembled import CONFIGURATION, fetch_model, read_text, store_of
from tests.support.cloud_servers import (
    ACCOUNT,
    BUCKET,
    AzureServer,
    CloudServer,
    GoogleServer,
    azure_server,
    google_server,
    missing_tools,
)
from tests.support.s3_server import Refusal, tar_gz, zip_file

pytestmark = pytest.mark.skipif(bool(missing_tools()), reason=missing_tools())

MODEL = {
    "tiny/config.json": b"{}",
    "tiny/model.safetensors": bytes(range(256)) * 2000,
    "tiny/empty.txt": b"",
    "tiny/adapters/a/adapter_config.json": b"{}",
    "tiny/odd [name] 'x'+ü%41.txt": b"odd",
    "other/config.json": b"not ours",
}
NAMES = {key.removeprefix("tiny/") for key in MODEL if key.startswith("tiny/")}


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    """Run Google's store."""
    with google_server() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    """Run Azure's store."""
    with azure_server() as server:
        yield server


@pytest.fixture(params=["google", "azure"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CloudServer:
    """Return each store in turn, with one model in it and without faults."""
    monkeypatch.setattr(transfer, "RETRY_PAUSES_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(cloud_bucket, "MAX_RETRIES", 1)
    server: CloudServer = request.getfixturevalue(request.param)
    server.empty()
    server.put(MODEL)
    return server


@pytest.fixture
def environ(store: CloudServer, tmp_path: Path) -> dict[str, str]:
    """Return variables for the store, and an empty cache."""
    return {**store.environ, "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache")}


def names_in(directory: Path) -> set[str]:
    """Return the relative names of all files in `directory` that were fetched."""
    files = (p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)) for p in files} - {".lmi-fetch.json"}


def failure(url: str, environ: dict[str, str]) -> str:
    """Return the error of a fetch."""
    with pytest.raises(DownloadError) as raised:
        fetch_model(url, environ=environ)
    return raised.value.text


def test_prefix_arrives_whole(store: CloudServer, environ: dict[str, str]) -> None:
    """Every object below the prefix, layout kept, in the folder of its URL; once."""
    url = f"{store.root}/tiny/"
    seen: list[DownloadProgress] = []
    directory = fetch_model(url, environ=environ, on_progress=seen.append)
    assert directory.name == hashlib.sha256(url.encode()).hexdigest()[:40]
    assert names_in(directory) == NAMES
    for name in NAMES:
        assert (directory / name).read_bytes() == MODEL[f"tiny/{name}"]
    assert (seen[-1].files, seen[-1].bytes) == (len(NAMES), seen[-1].bytes_total)

    store.objects_sent.clear()
    assert fetch_model(url, environ=environ) == directory
    assert store.objects_sent == []


def test_only_what_has_changed_is_fetched_again(
    store: CloudServer, environ: dict[str, str]
) -> None:
    """As of S3: the others are taken from the version before."""
    url = f"{store.root}/tiny/"
    fetch_model(url, environ=environ)
    store.put({"tiny/config.json": b'{"new": 1}'})
    store.objects_sent.clear()
    directory = fetch_model(url, environ=environ)
    assert (directory / "config.json").read_bytes() == b'{"new": 1}'
    assert set(store.objects_sent) == {"tiny/config.json"}


def test_large_objects_come_in_ranges(
    store: CloudServer, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each range goes to its place in the file."""
    monkeypatch.setattr(cloud_transfer, "PART_BYTES", 100_000)
    directory = fetch_model(f"{store.root}/tiny", environ=environ)
    assert (directory / "model.safetensors").read_bytes() == MODEL["tiny/model.safetensors"]
    assert store.objects_sent.count("tiny/model.safetensors") == 6


def test_cut_transfer_is_completed(store: CloudServer, environ: dict[str, str]) -> None:
    """A connection that breaks off in the middle is continued, or begun again."""
    store.cuts_left = 3
    directory = fetch_model(f"{store.root}/tiny/", environ=environ)
    assert store.cuts_left == 0
    assert (directory / "model.safetensors").read_bytes() == MODEL["tiny/model.safetensors"]
    assert names_in(directory) == NAMES


def test_what_arrived_before_a_failure_is_kept(
    store: CloudServer, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start fetches the rest."""
    monkeypatch.setattr(cloud_transfer, "CONNECTIONS", 1)
    url, sent = f"{store.root}/tiny/", store.objects_sent
    monkeypatch.setattr(
        cloud_transfer, "_fetch_part", _broken_for("model.safetensors", cloud_transfer._fetch_part)
    )
    assert "interrupted 3 times" in failure(url, environ)
    monkeypatch.undo()
    sent.clear()
    fetch_model(url, environ=environ)
    assert set(sent) == {"tiny/model.safetensors"}


def _broken_for(name: str, fetch: object) -> object:
    def fetch_part(store: object, stored: object, *more: object) -> None:
        if getattr(stored, "name", "") == name:
            raise cloud_transfer.InterruptedTransferError("cut")
        assert callable(fetch)
        fetch(store, stored, *more)

    return fetch_part


@pytest.mark.parametrize(("name", "pack"), [("m.tar.gz", tar_gz), ("m.zip", zip_file)])
def test_archive(store: CloudServer, environ: dict[str, str], name: str, pack: object) -> None:
    """It is replaced by its content."""
    assert callable(pack)
    store.put({f"packed/{name}": pack({"config.json": b"{}"})})
    assert names_in(fetch_model(f"{store.root}/packed/{name}", environ=environ)) == {"config.json"}
    assert "there is no such object" in failure(f"{store.root}/packed/other-{name}", environ)


def test_prefix_within_a_name(store: CloudServer, environ: dict[str, str]) -> None:
    """A star takes what begins so; without it only whole folders count."""
    store.put({"tiny-2/config.json": b"{}"})
    assert names_in(fetch_model(f"{store.root}/tiny*", environ=environ)) == {
        *(f"tiny/{name}" for name in NAMES), "tiny-2/config.json",
    }  # fmt: skip


def test_markers_of_folders_are_no_files(google: GoogleServer, tmp_path: Path) -> None:
    """Consoles make empty objects for folders."""
    google.empty()
    google.put({"m/": b"", "m/adapters/": b"", "m/adapters/a.json": b"{}", "m/config.json": b"{}"})
    environ = {**google.environ, "SERVING_DOWNLOAD_DIR": str(tmp_path)}
    names = {"adapters/a.json", "config.json"}
    assert names_in(fetch_model(f"gs://{BUCKET}/m/", environ=environ)) == names


def test_one_small_file(store: CloudServer, environ: dict[str, str]) -> None:
    """It is read without a fetch; None without one."""
    assert read_text(f"{store.root}/tiny/", "config.json", environ) == "{}"
    assert read_text(f"{store.root}/tiny/", "other.json", environ) is None


def test_cached_copy_serves_while_the_store_is_away(
    store: CloudServer, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning."""
    url = f"{store.root}/tiny/"
    directory = fetch_model(url, environ=environ)
    store.refusal = Refusal(503, "SlowDown")
    assert fetch_model(url, environ=environ) == directory
    assert "SlowDown): using the copy" in caplog.text
    assert "answered SlowDown" in failure(f"{store.root}/other/", environ)


def test_refusals_say_what_to_do(store: CloudServer, environ: dict[str, str]) -> None:
    """The bucket, its store, the code, and the rights that are needed."""
    store.refusal = Refusal(403, "AccessDenied")
    text = failure(f"{store.root}/tiny/", environ)
    assert f"{store.root}/tiny/: access to " in text
    assert BUCKET in text
    assert store.url in text
    assert "is denied (AccessDenied): the credentials need" in text
    code = "NoSuchBucket" if store.scheme == "gs" else "ContainerNotFound"
    store.refusal = Refusal(404, code)
    assert "does not exist: check the name" in failure(f"{store.root}/tiny/", environ)
    store.refusal = None
    assert "holds no objects: check the prefix" in failure(f"{store.root}/none/", environ)


def test_no_credentials(store: CloudServer, environ: dict[str, str]) -> None:
    """The machine has no identity either: the variables are named."""
    kept = {name: value for name, value in environ.items() if not name.endswith(("TOKEN", "KEY"))}
    text = failure(f"{store.root}/tiny/", kept)
    named = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": "AZURE_STORAGE_SAS_TOKEN"}
    assert "no usable credentials for " in text
    assert named[store.scheme] in text


def test_public_bucket(google: GoogleServer, tmp_path: Path) -> None:
    """Requests go out without credentials."""
    google.empty()
    google.put(MODEL)
    environ = {
        "GOOGLE_BASE_URL": google.url, "GOOGLE_SKIP_SIGNATURE": "true",
        "SERVING_DOWNLOAD_DIR": str(tmp_path),
    }  # fmt: skip
    assert names_in(fetch_model(f"gs://{BUCKET}/tiny/", environ=environ)) == NAMES
    assert not any(google.signed)


def test_silent_store_is_named(
    store: CloudServer, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not hold up a start for ever."""
    monkeypatch.setattr(cloud_bucket, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(cloud_bucket, "RETRY_SECONDS", 0.3)
    store.stall = threading.Event()
    assert "has sent nothing for 0.3 s" in failure(f"{store.root}/tiny/", environ)
    store.stall.set()


def test_store_that_stops_in_the_middle_is_named(
    store: CloudServer, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that ends to come is seen, too."""
    monkeypatch.setattr(cloud_bucket, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(cloud_bucket, "RETRY_SECONDS", 0.3)
    store.pause = threading.Event()
    text = failure(f"{store.root}/tiny/", environ)
    store.pause.set()
    assert "interrupted 3 times" in text


def test_wrong_account_key_is_not_printed(azure: AzureServer, tmp_path: Path) -> None:
    """Of whatever form it is."""
    azure.empty()
    for key in ("c2VjcmV0LXBhcnQ=", "no base64: secret-part"):
        environ = {**azure.environ, "AZURE_STORAGE_ACCOUNT_KEY": key}
        text = failure("az://models/tiny/", {**environ, "SERVING_DOWNLOAD_DIR": str(tmp_path)})
        assert text.startswith("az://models/tiny/")
        assert ("AZURE_STORAGE_ACCOUNT_KEY" in text) is (" " in key)  # no base64: never sent
        assert "secret-part" not in text
        assert key not in text


def test_sas_token_is_not_printed(azure: AzureServer, tmp_path: Path) -> None:
    """Of a refused request, and of a store that is not there."""
    azure.empty()
    environ = {name: value for name, value in azure.environ.items() if "KEY" not in name}
    environ |= {
        "AZURE_STORAGE_SAS_TOKEN": "sv=2021-08-06&sig=secret-part",
        "SERVING_DOWNLOAD_DIR": str(tmp_path),
    }
    for endpoint in (environ["AZURE_STORAGE_ENDPOINT"], f"http://127.0.0.1:9/{ACCOUNT}"):
        environ["AZURE_STORAGE_ENDPOINT"] = endpoint
        assert "secret-part" not in failure("az://models/tiny/", environ)


@pytest.mark.parametrize(
    "root", [f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net",
             f"https://{ACCOUNT}.blob.core.windows.net/{BUCKET}"]
)  # fmt: skip
def test_other_forms_of_azure(azure: AzureServer, tmp_path: Path, root: str) -> None:
    """They name the account themselves."""
    azure.empty()
    azure.put(MODEL)
    environ = {**azure.environ, "SERVING_DOWNLOAD_DIR": str(tmp_path)}
    del environ["AZURE_STORAGE_ACCOUNT_NAME"]
    assert names_in(fetch_model(f"{root}/tiny/", environ=environ)) == NAMES


def test_small_objects_are_compared_before_they_are_written(
    store: CloudServer, environ: dict[str, str], tmp_path: Path
) -> None:
    """What replicas share, and what is kept between starts: as in S3."""
    url = f"{store.root}/state/"
    source = store_of(url)
    assert source is not None
    folder = source.make_store(url, environ)
    first = folder.write("a.json", b"1", "")
    for wrong in ("", "17"):
        with pytest.raises(ObjectChangedError):
            folder.write("a.json", b"2", wrong)
    second = folder.write("a.json", b"2", first)
    assert folder.read_newer("a.json", second) == (None, second)
    assert folder.read_newer("a.json", first) == (b"2", second)
    assert folder.read_newer("none.json", "") == (None, "")
    third = folder.write("a.json", b"3")
    assert folder.read_newer("a.json", third) == (None, third)
    folder.below("deep").write("b.json", b"4")
    assert [one.name for one in folder.list_objects()] == ["a.json", "deep/b.json"]
    for _ in range(2):
        folder.delete("a.json")
    assert folder.find("a.json") is None
    with pytest.raises(ObjectChangedError):  # another replica has removed it
        folder.write("a.json", b"5", third)
    (tmp_path / "archive").write_bytes(b"content")
    folder.upload("archive", tmp_path / "archive")
    assert folder.read("archive") == b"content"


def test_adapters_are_shared_over_an_object(store: CloudServer, environ: dict[str, str]) -> None:
    """option.adapters_state: the store passes its check, and the slower of two writers loses."""
    url = f"{store.root}/state/"
    source = store_of(url)
    assert source is not None
    one, two = (
        StateObject(source.make_store(url, environ), "adapters.json", name) for name in "ab"
    )
    one.check_conditions()
    assert (one.read(), two.read()) == (None, None)
    one.write(ReplicatedAdapters({"x": Adapter("x", "/x")}, 1, {}))
    with pytest.raises(ObjectChangedError):
        two.write(ReplicatedAdapters({}, 1, {}))
    shared = two.read()
    assert shared is not None
    assert list(shared.adapters) == ["x"]
    two.write(ReplicatedAdapters({}, 2, {}))
    one.report(ReplicaReport(2, {}))
    assert list(two.live_reports()) == ["a"]


def test_large_objects_are_not_read_into_memory(
    store: CloudServer, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong key of a small object."""
    monkeypatch.setattr(location, "MAX_SMALL_BYTES", 1000)
    with pytest.raises(DownloadError, match=r"has 512000 bytes; at most 1000 are read"):
        read_text(f"{store.root}/tiny/", "model.safetensors", environ)


def test_validate_reads_the_model_in_the_store(
    store: CloudServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.json; no weights are fetched."""
    config = (DEMO_MODEL_DIR / "config.json").read_bytes()
    store.put({"tiny/config.json": config})
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser, CONFIGURATION)
    given = ["--format", "json", "--model", f"{store.root}/tiny/", "--model-store", "/nonexistent"]
    validate.run(parser.parse_args(given), store.environ, CONFIGURATION)
    document = json.loads(capsys.readouterr().out)
    assert not document["errors"]
    assert any(f"config.json of {store.root}/tiny" in line for line in document["checked"])
    assert "tiny/model.safetensors" not in store.objects_sent


def test_streamed_weights_stay_in_the_store(store: CloudServer, environ: dict[str, str]) -> None:
    """VLLM reads them itself, by URLs that it knows: others are fetched whole."""
    source = CONFIGURATION.sources
    assert source.is_streamed_by_vllm(f"{store.root}/tiny/")
    assert not source.is_streamed_by_vllm(f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net/tiny/")
    directory = fetch_model(f"{store.root}/tiny/", environ=environ, load_format="runai_streamer")
    assert names_in(directory) == NAMES - {"model.safetensors"}
    if store.scheme == "az":
        url = f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net/tiny/"
        assert names_in(fetch_model(url, environ=environ, load_format="runai_streamer")) == NAMES
        directory = fetch_model(url, environ=environ, load_format="dummy")
        assert names_in(directory) == NAMES - {"model.safetensors"}
