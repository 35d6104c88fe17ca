"""Fetches by real processes: killed in the middle, and two of them at once."""

import os
import signal
import sys
import threading
from pathlib import Path

from tests.support.assembled import fetch_model
from tests.support.fetching import fetching, wait_until
from tests.support.hub_server import Repository, hub_server

LARGE = bytes(range(256)) * 4000


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
