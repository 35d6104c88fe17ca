"""Sticky sessions over two servers with disks of their own and one `sessions_s3url`, by HTTP.

Proves that a session of one server is used and closed on the other. Its expiry is the same on both.
A server that ends does not restore a session that the other has closed.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from integration.client import Answer, call, wait_until
from integration.conftest import ServerProcess, StartServer
from tests.support.s3_server import BUCKET, S3Server, s3_server

HEADER = "x-amzn-sagemaker-session-id"
CLOSED = "x-amzn-sagemaker-closed-session-id"
EXPIRED = "has expired; the request goes on without one"
ARGUMENTS = ("--demo", "--port", "0", "--engine", "scripted")


@dataclass
class Replica:
    """One server, and the directory of its sessions."""

    server: ServerProcess
    url: str
    folder: Path

    def create(self) -> str:
        """Return a new session."""
        answer = call(self.url, "/invocations", {"requestType": "NEW_SESSION"})
        return answer.headers[HEADER].partition(";")[0]

    def use(self, session: str) -> Answer:
        """Ask for an answer with the session."""
        return call(self.url, "/invocations", {"inputs": "x"}, headers={HEADER: session})

    def close(self, session: str) -> Answer:
        """Close it."""
        return call(self.url, "/invocations", {"requestType": "CLOSE"}, headers={HEADER: session})

    def expiry(self, session: str) -> float:
        """Return when it expires, by the file of this server."""
        found: float = json.loads((self.folder / session / ".session.json").read_bytes())["expires"]
        return found

    def has_expired(self, session: str) -> bool:
        """Use it, and return whether the server has found it expired; it answers anyway."""
        assert self.use(session).status == 200
        return f"session {session} {EXPIRED}" in self.server.stderr


@pytest.fixture
def store() -> Iterator[S3Server]:
    """An S3 store."""
    with s3_server() as running:
        yield running


@pytest.fixture
def start(server_process: StartServer, store: S3Server, tmp_path: Path) -> "Start":
    """Return what starts a replica."""
    return Start(server_process, store, tmp_path)


@dataclass
class Start:
    """Starts replicas, each with a disk of its own."""

    server_process: StartServer
    store: S3Server
    folder: Path

    def __call__(self, name: str, seconds: float = 1200) -> Replica:
        """Return a replica once it is ready; its sessions live so long."""
        environ = {
            **self.store.environ,
            "AWS_EC2_METADATA_DISABLED": "true",
            "OPTION_SESSIONS_PATH": str(self.folder / name),
            "OPTION_SESSIONS_S3URL": f"s3://{BUCKET}/kept",
            "OPTION_SESSIONS_EXPIRATION": str(seconds),
        }
        server = self.server_process(*ARGUMENTS, environ=environ)
        return Replica(server, server.url_when_ready(30), self.folder / name)


def kept(store: S3Server) -> list[str]:
    """Return the objects below `sessions_s3url`."""
    found = store.client.list_objects_v2(Bucket=BUCKET, Prefix="kept/").get("Contents", ())
    return [entry["Key"] for entry in found]


def test_session_is_created_on_one_used_and_closed_on_the_other(
    start: Start, store: S3Server
) -> None:
    """What one closes is unknown to both, also after the other has copied its disk and ended."""
    a, b = start("a"), start("b")
    session, other = a.create(), b.create()
    assert [one.use(name).status for one in (a, b) for name in (session, other)] == [200] * 4
    assert sorted(kept(store)) == sorted(f"kept/{name}/.session.json" for name in (session, other))
    closed = b.close(session)
    assert (closed.status, closed.headers[CLOSED]) == (200, session)
    for answer in (a.use(session), b.use(session), a.close(session), b.close(session)):
        assert (answer.status, b"session not found" in answer.body) == (424, True)
    a.server.process.send_signal(signal.SIGTERM)
    assert a.server.wait_exit() == 0
    assert kept(store) == [f"kept/{other}/.session.json"]
    assert (b.use(session).status, b.use(other).status, start("c").use(other).status) == (
        424,
        200,
        200,
    )


def test_store_that_hangs_is_an_error_in_time(start: Start, store: S3Server) -> None:
    """A session of the other server is 503, one of its own goes on, and the server still ends."""
    a, b = start("a"), start("b")
    own, other = a.create(), b.create()
    store.stall = threading.Event()
    began = time.monotonic()
    refused = a.use(other)
    assert (refused.status, b"the session cannot be looked up now" in refused.body) == (503, True)
    assert [answer.status for answer in (a.use(own), a.use(a.create()))] == [200, 200]
    assert time.monotonic() < began + 40
    a.server.process.send_signal(signal.SIGTERM)
    assert a.server.wait_exit() == 0
    store.stall.set()
    assert b.use(other).status == 200


def test_expiry_counts_once_from_the_creation(start: Start) -> None:
    """The server that meets a session late gives it no life of its own."""
    a, b = start("a", 5), start("b", 600)
    session = a.create()
    assert b.use(session).status == 200
    assert b.expiry(session) == a.expiry(session)
    for replica in (b, a):
        assert wait_until(lambda one=replica: one.has_expired(session), 60)  # type: ignore[misc]
