"""Sticky sessions: create, check, close over files. Their only state is on the disk.

A session is a directory named by its id with one small file in it that says when it expires. A
restarted process, or another one over the same `sessions_path`, finds the same sessions. With
`sessions_s3url` every replica does: S3 decides which exist, the directory holds the local files.
"""

import asyncio
import logging
import os
import re
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import orjson

from lmi_vllm.errors import (
    DownloadError,
    EngineFailureError,
    NotReadyError,
    PayloadError,
    RequestError,
)
from lmi_vllm.features.sessions.settings import DEFAULT_ROOT
from lmi_vllm.messages import Reply
from lmi_vllm.sources.base import InterruptedTransferError, ObjectStore, UnreachableError
from lmi_vllm.sources.table import Sources
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
SESSION_HEADER: Final = "X-Amzn-SageMaker-Session-Id"
SESSION_PROPERTY: Final = SESSION_HEADER.lower()
CLOSED_HEADER: Final = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION: Final = "NEW_SESSION"
CLOSE: Final = "CLOSE"
REQUEST_TYPE: Final = "requestType"
# Sessions that are never closed: the directory is in memory (/dev/shm) by default.
MAX_SESSIONS: Final = 10_000

STORE_SECONDS: Final = 5.0  # that S3 has to answer
AWAY_SECONDS: Final = 5.0  # before it is asked again
MAX_CALLS: Final = 16
STORE_ERRORS: Final = (UnreachableError, InterruptedTransferError, DownloadError)
FILE: Final = ".session.json"
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_UNSHARED: Final = ".unshared"  # S3 was away when the session was created


class SharedSessions:
    """The small objects below `option.sessions_s3url`; calls block, may raise `STORE_ERRORS`.

    No call takes longer than `STORE_SECONDS`. After one that had no answer in this time, calls fail
    at once for `AWAY_SECONDS`: else every request that names a session would wait.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(MAX_CALLS, "sessions-store")
        self._away_until = 0.0

    def put(self, name: str, content: bytes) -> None:
        """Write the session's object."""
        self._call(self._store.write, f"{name}/{FILE}", content)

    def find(self, name: str) -> tuple[float, str] | None:
        """Return the session's expiry and client; None if missing or unreadable."""
        content = self._call(self._store.read, f"{name}/{FILE}")
        try:
            return None if content is None else _read(content)
        except (ValueError, TypeError, KeyError):
            return None

    def delete(self, name: str) -> None:
        """Delete the session's object, for all replicas."""
        self._call(self._store.delete, f"{name}/{FILE}")

    def _call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if time.monotonic() < self._away_until:
            raise UnreachableError("it did not answer a moment ago")
        waiting = self._pool.submit(call, *args, **kwargs)
        try:
            return waiting.result(STORE_SECONDS)
        except TimeoutError as error:
            waiting.cancel()
            self._away_until = time.monotonic() + AWAY_SECONDS
            raise UnreachableError(f"no answer within {STORE_SECONDS:g} s") from error


def shared_sessions(
    url: str | None, environ: Mapping[str, str], sources: Sources
) -> SharedSessions | None:
    """Return the sessions below the URL; None without one, or where it names no store."""
    store = sources.store_of(url.strip()) if url else None
    if store is None or url is None:
        return None
    return SharedSessions(store.make_store(f"{url.strip().rstrip('/')}/", environ))


class Sessions:
    """The sessions below `root`, each for `expiration_seconds` from its creation."""

    def __init__(
        self,
        root: Path = DEFAULT_ROOT,
        expiration_seconds: float = 1200.0,
        *,
        is_enabled: bool = True,
        shared: SharedSessions | None = None,
        now: Callable[[], float] = time.time,
        most: int = MAX_SESSIONS,
    ) -> None:
        self.root = root
        self._expiration_seconds = expiration_seconds
        self._is_enabled = is_enabled
        self._shared = shared
        self._now = now
        self._most = most
        self._lock = asyncio.Lock()
        # What is in the files, which never change: each is read once, not for each new session.
        self._seen: dict[str, tuple[float, str]] = {}
        # Not asyncio's own, which prompts and adapters share: a store that hangs would fill it.
        self._pool = ThreadPoolExecutor(MAX_CALLS, "sessions")

    async def check(self, properties: Mapping[str, str]) -> None:
        """Check the session of a request: a known one, an expired one and none are accepted.

        Raises:
            PayloadError: the session is unknown, or sessions are off.
            NotReadyError: it is not known here, and S3 does not answer.
        """
        given = properties.get(SESSION_PROPERTY, "").strip()
        if given and not self._is_enabled:
            raise PayloadError("stateful sessions not enabled")
        name = _session_id(properties)
        if not name:
            return
        expires = await self._in_pool(self._find, name)
        if expires is None:
            raise PayloadError("session not found")
        if expires <= self._now():
            logger.info("session %s has expired; the request goes on without one", name)

    async def answer(self, payload: Mapping[str, Any], properties: Mapping[str, str]) -> Reply:
        """Create or close a session; the reply has its id in a header.

        Raises:
            PayloadError: another request type, no such session, or sessions are off.
            EngineFailureError: the disk refuses.
        """
        if not self._is_enabled:
            raise PayloadError("stateful sessions not enabled")
        kind = payload[REQUEST_TYPE]
        if kind not in (NEW_SESSION, CLOSE):
            raise PayloadError(f"{REQUEST_TYPE}: expected {NEW_SESSION} or {CLOSE} (got {kind!r})")
        name = _session_id(properties)
        if kind == CLOSE and not name:
            raise PayloadError("invalid session_id")
        async with self._lock:
            try:
                if kind == CLOSE:
                    return await self._in_pool(self._close, name)
                record = current_record()
                return await self._in_pool(self._create, "" if record is None else record.source)
            except OSError as error:
                text = f"sessions_path {self.root}: {error.strerror or error}"
                raise EngineFailureError(text) from error

    def _in_pool(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def _create(self, source: str) -> Reply:
        """Create a session of a client, after expired ones are removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._make_room(source)
        name = str(uuid.uuid4())
        expires = self._now() + self._expiration_seconds
        content = self._write(name, expires, source)
        self._share(name, content)
        logger.info("session %s created", name)
        shown = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return _reply(f"Session {name} created", SESSION_HEADER, f"{name}; Expires={shown}")

    def _make_room(self, source: str) -> None:
        """Remove expired sessions; where all are taken, the oldest of the client with the most.

        Raises:
            RequestError: no client has more than this one.
        """
        live = self._live()
        if sum(map(len, live.values())) < self._most:
            return
        most = max(live, key=lambda one: len(live[one]))
        if len(live[most]) <= len(live[source]):
            raise RequestError(f"there are {self._most} sessions already; close some")
        with suppress(PayloadError):  # another replica has just closed it
            self._close(min(live[most])[1])

    def _close(self, name: str) -> Reply:
        if self._find(name) is None:
            raise PayloadError("session not found")
        if self._shared is not None:
            try:
                self._shared.delete(name)
            except STORE_ERRORS as error:
                raise NotReadyError("the session cannot be closed now") from error
        shutil.rmtree(self.root / name)
        logger.info("session %s closed", name)
        return _reply(f"Session {name} closed", CLOSED_HEADER, name)

    def _write(self, name: str, expires: float, source: str) -> bytes:
        """Create the session's directory and its file, atomically; return its content."""
        content = orjson.dumps({"expires": expires, "source": source})
        folder = self.root / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = folder / f"{FILE}.partial"
        partial.write_bytes(content)
        partial.rename(folder / FILE)
        return content

    def _share(self, name: str, content: bytes) -> None:
        """Publish the session to the other replicas; where S3 fails it stays local."""
        if self._shared is None:
            return
        try:
            self._shared.put(name, content)
        except STORE_ERRORS as error:
            (self.root / name / _UNSHARED).touch()
            logger.error("session %s is known on this server only: %s", name, error)

    def _find(self, name: str) -> float | None:
        """Return a session's expiry, also of another replica's; None where there is none."""
        local = self._expiry(name)
        if self._shared is None or not _ID.fullmatch(name):
            return local
        try:
            found = self._shared.find(name)
        except STORE_ERRORS as error:
            logger.error("session %s cannot be looked up: %s", name, error)
            if local is None:
                raise NotReadyError("the session cannot be looked up now") from error
            return local
        if found is None and local is not None and not (self.root / name / _UNSHARED).exists():
            shutil.rmtree(self.root / name, ignore_errors=True)  # closed on another replica
            return None
        if found is not None and local is None:
            self._write(name, *found)
        return local if found is None else found[0]

    def remove_closed(self) -> None:
        """Remove the directories of sessions that another replica has closed; blocks."""
        if self._shared is not None and self.root.is_dir():
            for entry in os.scandir(self.root):
                with suppress(NotReadyError):
                    self._find(entry.name)

    def _live(self) -> dict[str, list[tuple[float, str]]]:
        """Remove expired sessions; return expiry and name of the others by their client."""
        live = defaultdict[str, list[tuple[float, str]]](list)
        seen, self._seen = self._seen, {}
        for entry in os.scandir(self.root):
            found = seen.get(entry.name) or self._read(entry.name)
            if found is None:
                continue
            expires, source = found
            if expires <= self._now():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                self._seen[entry.name] = found
                live[source].append((expires, entry.name))
        return live

    def _expiry(self, name: str) -> float | None:
        """Return the local expiry in seconds since the epoch; None where there is none."""
        found = self._read(name)
        return None if found is None else found[0]

    def _read(self, name: str) -> tuple[float, str] | None:
        """Return a local session's expiry and client; None where there is none."""
        if not _ID.fullmatch(name):
            return None
        try:
            return _read((self.root / name / FILE).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("session %s cannot be read: %s", name, error)
            return None


def _read(content: bytes) -> tuple[float, str]:
    """Return expiry, in seconds since the epoch, and client of a session's file or object."""
    session = orjson.loads(content)
    return float(session["expires"]), str(session.get("source", ""))


def is_session_request(payload: Mapping[str, Any]) -> bool:
    """Return whether a payload is about a session and not an inference request."""
    others = ("prompt", "inputs", "messages")
    return REQUEST_TYPE in payload and not any(key in payload for key in others)


def _session_id(properties: Mapping[str, str]) -> str:
    """Return the session id of a request, "" without one; the expiry after `;` is dropped."""
    given = properties.get(SESSION_PROPERTY, "").partition(";")[0].strip()
    return "" if given == NEW_SESSION else given


def _reply(result: str, header: str, value: str) -> Reply:
    body = orjson.dumps({"result": result}) + b"\n"
    return Reply(200, "application/json", body, headers={header: value})
