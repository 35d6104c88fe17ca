"""LMI's `session_manager`: a handler's own sessions, each a folder of files.

They are beside the server's own sessions, in a folder that only this user can read and write.
Values are files of JSON, or bytes: LMI's pickles are not read, since they would run code.
"""

import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

_SHARED_MEMORY: Final = Path("/dev/shm")
_FOLDER: Final = "djl_sessions"
_EXPIRY: Final = ".expiration_ts"
_JSON: Final = b"j"
_BYTES: Final = b"b"
_ID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Session:
    """One session: values by name, and arrays in files."""

    def __init__(
        self, session_id: str, session_root: str, expiration_ts: float | None = None
    ) -> None:
        self.session_id = session_id
        self.files_path = str(Path(session_root) / session_id)
        self.expiration_ts: float | None = expiration_ts
        if expiration_ts is None:
            self.expiration_ts = self.get(_EXPIRY)

    def put(self, key: str, value: Any) -> None:
        """Write a value: bytes, or anything that JSON holds.

        Raises:
            TypeError: JSON cannot hold it.
        """
        path = self._path(key)
        is_bytes = isinstance(value, bytes | bytearray)
        content = _BYTES + bytes(value) if is_bytes else _JSON + json.dumps(value).encode()
        partial = path.with_name(f".{uuid.uuid4().hex}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def get(self, key: str, d: Any = None) -> Any:
        """Return a value; `d` without one."""
        path = self._path(key)
        if not path.is_file():
            return d
        content = path.read_bytes()
        return content[1:] if content.startswith(_BYTES) else json.loads(content[1:])

    def get_as_numpy(
        self, key: str, shape: tuple[int, ...], dtype: Any = "float32", create: bool = False
    ) -> Any:
        """Return the array in a file, which changes with the array; `create` begins a new one.

        Raises:
            OSError: the disk has no room for it. Else the kernel would end the server at a write.
        """
        import numpy  # noqa: PLC0415 (only where a hook uses it)

        path = self._path(key)
        array = numpy.memmap(path, dtype=dtype, mode="w+" if create else "r+", shape=shape)
        if create and hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, array.nbytes)
        return array

    def remove(self) -> bool:
        """Remove the session's files.

        Raises:
            ValueError: there are none.
        """
        if not Path(self.files_path).is_dir():
            raise ValueError(f"session directory does not exist: {self.session_id}")
        shutil.rmtree(self.files_path)
        return True

    def _path(self, key: str) -> Path:
        return Path(self.files_path) / key.replace("/", "-")


class SessionManager:
    """The sessions of a handler. `properties` are those of its `Input`."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.expiration = float(properties.get("sessions_expiration", 20 * 60))
        root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path("/tmp")
        usual = root / f"{_FOLDER}_of_handlers-{os.geteuid()}"
        self.sessions_path = str(properties.get("sessions_path") or usual)
        _check_folder(Path(self.sessions_path))
        self.sessions: dict[str, Session] = {}
        for path in Path(self.sessions_path).iterdir():
            if _is_session(path):
                self._take(path.name)

    def create_session(self) -> Session:
        """Return a new session; those that have expired are removed."""
        self._clean_expired_session()
        expiry = time.time() + self.expiration
        session = Session(str(uuid.uuid4()), self.sessions_path, expiry)
        Path(session.files_path).mkdir(mode=0o700)
        session.put(_EXPIRY, expiry)
        self.sessions[session.session_id] = session
        return session

    def get_session(self, session_id: str | None) -> Session | None:
        """Return a session; None where none is named, or where it has expired.

        Raises:
            ValueError: there is none of that id.
        """
        if not session_id or session_id == "NEW_SESSION":
            return None
        session = self._named(session_id)
        return None if _is_over(session) else session

    def close_session(self, session_id: str | None) -> None:
        """Remove a session.

        Raises:
            ValueError: there is none of that id.
        """
        session = self._named(session_id or "")
        session.remove()
        del self.sessions[session.session_id]

    def _named(self, session_id: str) -> Session:
        if session_id not in self.sessions:  # another process may have made it
            if not _is_session(Path(self.sessions_path) / session_id):
                raise ValueError(f"session not found: {session_id}")
            self._take(session_id)
        if session_id not in self.sessions:
            raise ValueError(f"session not found: {session_id}")
        return self.sessions[session_id]

    def _take(self, session_id: str) -> None:
        try:
            self.sessions[session_id] = Session(session_id, self.sessions_path)
        except (OSError, ValueError):  # one of LMI's, or a damaged one
            logger.warning("session %s cannot be read: it is left alone", session_id)

    def _clean_expired_session(self) -> None:
        for session_id, session in [*self.sessions.items()]:
            if _is_over(session):
                shutil.rmtree(session.files_path, ignore_errors=True)
                del self.sessions[session_id]


def _is_session(path: Path) -> bool:
    """Return whether a folder is a session of a handler; the server's own have no such file."""
    return bool(_ID.fullmatch(path.name)) and not path.is_symlink() and (path / _EXPIRY).is_file()


def _is_over(session: Session) -> bool:
    return session.expiration_ts is None or time.time() > session.expiration_ts


def _check_folder(folder: Path) -> None:
    """Make the folder for this user alone.

    Raises:
        PermissionError: it is another user's, or others can write it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = folder.stat()
    if folder.is_symlink() or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is not only this user's: set option.sessions_path")
