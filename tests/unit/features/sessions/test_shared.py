"""Sessions of several replicas over one prefix in a real S3 store."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lmi_vllm.errors import NotReadyError, PayloadError
from lmi_vllm.features.sessions import sessions
from lmi_vllm.features.sessions.sessions import (
    CLOSE,
    NEW_SESSION,
    REQUEST_TYPE,
    SESSION_HEADER,
    SESSION_PROPERTY,
    Sessions,
    shared_sessions,
)
from lmi_vllm.features.sessions.start import copy_sessions
from tests.support.assembled import SOURCES
from tests.support.s3_server import BUCKET, Refusal, S3Server

URL = f"s3://{BUCKET}/kept"
AWAY = Refusal(503, "SlowDown")
Replica = Callable[[str], Sessions]


class Clock:
    """The time of all replicas."""

    now = 1000.0

    def __call__(self) -> float:
        """Return it."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return the time of the test."""
    return Clock()


@pytest.fixture
def replica(
    empty_store: S3Server, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Replica:
    """Return what makes the sessions of a replica with a disk of its own."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(sessions, "STORE_SECONDS", 60.0)  # for a busy machine
    shared = shared_sessions(URL, empty_store.environ, SOURCES)
    assert shared is not None
    return lambda name: Sessions(tmp_path / name, 60, shared=shared, now=clock)


async def create(sessions: Sessions) -> dict[str, str]:
    """Create a session and return what its requests carry."""
    reply = await sessions.answer({REQUEST_TYPE: NEW_SESSION}, {})
    return {SESSION_PROPERTY: reply.headers[SESSION_HEADER].partition(";")[0]}


async def test_session_of_one_replica_is_accepted_by_another(
    replica: Replica, tmp_path: Path
) -> None:
    """With its directory, and the expiry of its creation."""
    a, b = replica("a"), replica("b")
    session = await create(a)
    await b.check(session)
    files = [tmp_path / name / session[SESSION_PROPERTY] / ".session.json" for name in "ab"]
    content = {"expires": 1060.0, "source": ""}
    assert [json.loads(file.read_text()) for file in files] == [content] * 2


async def test_expiry_counts_once(
    replica: Replica, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not start again on each replica that sees the session."""
    a, b = replica("a"), replica("b")
    session = await create(a)
    clock.now += 50
    await b.check(session)
    clock.now += 11
    with caplog.at_level("INFO"):
        await b.check(session)
    assert "has expired" in caplog.text


async def test_session_that_one_closes_is_closed_on_all(
    replica: Replica, empty_store: S3Server, tmp_path: Path
) -> None:
    """Also where its directory still is; the copy at the end does not bring it back."""
    a, b = replica("a"), replica("b")
    session, other = await create(a), await create(a)
    await b.check(session)
    await b.answer({REQUEST_TYPE: CLOSE}, session)
    await copy_sessions(a, URL, empty_store.environ, SOURCES)
    with pytest.raises(PayloadError, match="session not found"):
        await replica("c").check(session)
    with pytest.raises(PayloadError, match="session not found"):
        await a.check(session)
    await a.check(other)
    await replica("c").check(other)


async def test_unavailable_store_keeps_local_sessions(
    replica: Replica, empty_store: S3Server
) -> None:
    """A session of another replica is 503, not unknown; one that is made is known here."""
    a, b = replica("a"), replica("b")
    elsewhere = await create(b)
    empty_store.refusal = AWAY
    own = await create(a)
    await a.check(own)
    with pytest.raises(NotReadyError):
        await a.check(elsewhere)
    with pytest.raises(NotReadyError):
        await a.answer({REQUEST_TYPE: CLOSE}, own)
    empty_store.refusal = None
    await a.check(own)
    await a.check(elsewhere)
    await copy_sessions(a, URL, empty_store.environ, SOURCES)
    await b.check(own)


async def test_store_that_hangs_holds_no_request(
    replica: Replica, empty_store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is answered as where S3 refuses, and only some of them wait for it at all."""
    a, b = replica("a"), replica("b")
    own, elsewhere = await create(a), await create(b)
    monkeypatch.setattr(sessions, "STORE_SECONDS", 0.5)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    empty_store.stall = threading.Event()
    try:
        async with asyncio.timeout(20):
            checks = [asyncio.create_task(a.check(elsewhere)) for _ in range(40)]
            await asyncio.sleep(0.1)
            assert await asyncio.to_thread(str, 1) == "1"  # other work has its threads
            failures = await asyncio.gather(*checks, return_exceptions=True)
            assert [type(one) for one in failures] == [NotReadyError] * 40
            await a.check(own)
            with pytest.raises(NotReadyError):
                await a.answer({REQUEST_TYPE: CLOSE}, own)
            new = await create(a)
            await a.check(new)
    finally:
        empty_store.stall.set()
    monkeypatch.setattr(sessions, "STORE_SECONDS", 60.0)
    async with asyncio.timeout(60):
        while not await is_found(a, elsewhere):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def is_found(at: Sessions, session: dict[str, str]) -> bool:
    """Return whether a session that is not known there can be looked up now."""
    try:
        await at.check(session)
    except NotReadyError:
        return False
    return True


async def test_clocks_that_differ_close_no_session(tmp_path: Path, empty_store: S3Server) -> None:
    """The time of the creation counts on all; a server whose clock is ahead removes only files."""
    shared = shared_sessions(URL, empty_store.environ, SOURCES)
    behind, ahead = Clock(), Clock()
    ahead.now = behind.now + 600
    a, b = (
        Sessions(tmp_path / name, 60, shared=shared, now=clock)
        for name, clock in (("a", behind), ("b", ahead))
    )
    session = await create(a)
    await b.check(session)
    await create(b)
    for one in (a, b, a):
        await one.check(session)
    files = [tmp_path / name / session[SESSION_PROPERTY] / ".session.json" for name in "ab"]
    assert [json.loads(file.read_text()) for file in files] == [
        {"expires": 1060.0, "source": ""}
    ] * 2


async def test_unknown_and_malformed_ids_are_refused(
    replica: Replica, empty_store: S3Server
) -> None:
    """What is no id never becomes a key."""
    a, before = replica("a"), len(empty_store.signed)
    with pytest.raises(PayloadError, match="session not found"):
        await a.check({SESSION_PROPERTY: "../../other"})
    assert len(empty_store.signed) == before
    with pytest.raises(PayloadError, match="session not found"):
        await a.check({SESSION_PROPERTY: "00000000-0000-0000-0000-000000000000"})
