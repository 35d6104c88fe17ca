"""The model in Google's store, adapters in Azure's and Google's, on the real engine over HTTP.

One server for all: connections to both stores are cut while it starts. Adapters are named in the
settings, registered by calls, and found in a store on demand.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, running_server
from lmi_vllm.demo import DEMO_MODEL_DIR
from tests.support.adapter_files import make_adapter
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
from tests.support.s3_server import Refusal, tar_gz

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.random_order(disabled=True),  # what one server has fetched
    pytest.mark.skipif(bool(missing_tools()), reason=missing_tools()),
]
GREETING = {"inputs": "The capital of France is"}
LONG_ROOT = f"abfss://{BUCKET}@{ACCOUNT}.dfs.core.windows.net"


@pytest.fixture(scope="module")
def google() -> Iterator[GoogleServer]:
    """Google's store with the model and an adapter; so many transfers break off."""
    with google_server() as store:
        files = [path for path in DEMO_MODEL_DIR.rglob("*") if path.is_file()]
        store.put({
            f"models/tiny/{path.relative_to(DEMO_MODEL_DIR).as_posix()}": path.read_bytes()
            for path in files
        })  # fmt: skip
        store.cuts_left = 3
        yield store


@pytest.fixture(scope="module")
def azure() -> Iterator[AzureServer]:
    """Azure's store."""
    with azure_server() as store:
        yield store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's log and cache."""
    return tmp_path_factory.mktemp("clouds")


@pytest.fixture(scope="module")
def server(google: GoogleServer, azure: AzureServer, folder: Path) -> Iterator[RunningServer]:
    """A server whose model is in one store and whose first adapter is in the other."""
    put(azure, "own", make_adapter(folder / "own", 1))
    azure.cuts_left = 1
    environ = {
        **google.environ,
        **azure.environ,
        "HF_MODEL_ID": f"gs://{BUCKET}/models/tiny/",
        "OPTION_ENABLE_LORA": "true",
        "OPTION_LORA_MODULES": f"own=az://{BUCKET}/lora/own/",
        "OPTION_ADAPTER_STORE": f"gs://{BUCKET}/lora/",
        "OPTION_ADAPTER_STORE_REFRESH_SECONDS": "1",
        "SERVING_DOWNLOAD_DIR": str(folder / "cache"),
    }
    with running_server(folder, environ=environ) as running:
        yield running


def put(store: CloudServer, name: str, folder: Path) -> None:
    """Store an adapter under a name, beside a file that is none of its own."""
    files = {f"lora/{name}/{file.name}": file.read_bytes() for file in folder.iterdir()}
    store.put({**files, f"lora/{name}/optimizer.pt": b"x" * 1000})


def ask(url: str, adapter: str) -> str:
    """Return an adapter's answer."""
    answer = call(url, "/invocations", {**GREETING, "adapters": adapter})
    assert answer.status == 200, answer.body
    text: str = answer.json()["generated_text"]
    return text


def copies(folder: Path) -> int:
    """Return how many sources the cache holds."""
    return sum(path.is_dir() for path in (folder / "cache" / "download").iterdir())


def test_model_and_its_adapters_arrive_over_cut_connections(
    server: RunningServer, google: GoogleServer, azure: AzureServer
) -> None:
    """They serve; of an adapter only its files are fetched."""
    assert (google.cuts_left, azure.cuts_left) == (0, 0)
    answer = call(server.url, "/invocations", GREETING)
    assert answer.json()["generated_text"].startswith(" Paris")
    assert ask(server.url, "capitals").startswith(" PARIS")  # of the model's own folder
    assert ask(server.url, "own")
    assert "lora/own/adapter_model.safetensors" in azure.objects_sent
    assert "lora/own/optimizer.pt" not in azure.objects_sent


def test_adapters_come_and_go_at_run_time(
    server: RunningServer, google: GoogleServer, azure: AzureServer, folder: Path
) -> None:
    """From both stores, from an archive, in Azure's long form; copies go with the adapter."""
    weights = make_adapter(folder / "weights", 2)
    for store in (google, azure):
        put(store, "late", weights)
        packed = {file.name: file.read_bytes() for file in weights.iterdir()}
        store.put({"packed/late.tar.gz": tar_gz(packed)})
    before, answers = copies(folder), set()
    for source in (
        f"gs://{BUCKET}/lora/late/", f"az://{BUCKET}/lora/late", f"{LONG_ROOT}/lora/late/",
        f"gs://{BUCKET}/packed/late.tar.gz", f"az://{BUCKET}/packed/late.tar.gz",
    ):  # fmt: skip
        azure.cuts_left = google.cuts_left = 1
        added = call(server.url, f"/adapters?name=late-call&src={source}", method="POST")
        assert added.status == 200, added.body
        answers.add(ask(server.url, "late-call"))
        listed = {one["name"]: one for one in call(server.url, "/adapters").json()["adapters"]}
        assert listed["late-call"]["src"] == source
        assert call(server.url, "/adapters/late-call", method="DELETE").status == 200
        assert wait_until(lambda: copies(folder) == before, 10)
    azure.forget()
    google.forget()
    assert len(answers) == 1


def test_adapters_are_found_on_demand(
    server: RunningServer, google: GoogleServer, tmp_path: Path
) -> None:
    """Below the prefix of option.adapter_store."""
    put(google, "found", make_adapter(tmp_path / "found", 3))
    assert ask(server.url, "found") != ask(server.url, "own")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (f"az://{BUCKET}/lora/none/", "holds no objects: check the prefix"),
        ("az://nowhere/lora/own/", "does not exist: check the name"),
        ("abfss://c@other.dfs.core.windows.net/a", "are not sent to another"),
        (f"az://{BUCKET}/lora/own/?sig=secret-part", "set AZURE_STORAGE_SAS_TOKEN instead"),
        ("wasbs://c@other.blob.core.windows.net/a", "write az://container/path"),
    ],
)
def test_sources_that_cannot_be_had(server: RunningServer, source: str, text: str) -> None:
    """The answer says why and what to do; nothing stays, and no secret is shown."""
    quoted = source.replace("?", "%3F").replace("=", "%3D")
    refused = call(server.url, f"/adapters?name=bad&src={quoted}", method="POST")
    assert refused.status == 424, refused.body
    assert text in refused.json()["message"]
    assert b"secret-part" not in refused.body
    assert "secret-part" not in server.process.stderr


def test_store_that_refuses_or_is_away(
    server: RunningServer, azure: AzureServer, google: GoogleServer
) -> None:
    """A registration fails with the store's name; what is served goes on."""
    azure.refusal = Refusal(403, "AuthorizationPermissionMismatch")
    path = f"/adapters?name=bad&src=az://{BUCKET}/lora/late/"
    refused = call(server.url, path, method="POST")
    assert refused.status == 424
    assert "is denied (AuthorizationPermissionMismatch)" in refused.json()["message"]
    azure.refusal = Refusal(503, "ServerBusy")
    busy = call(server.url, path, method="POST", seconds=120)
    assert busy.status == 424
    assert f"container {BUCKET} of the storage account {ACCOUNT}" in busy.json()["message"]
    azure.forget()
    assert ask(server.url, "own")
