"""The addresses where the server listens, and the API keys.

Another management address is a second listener, which has only the
management routes. Files are read when the port opens, and by `explain`. Those of keys and TLS are
read again when they have changed.
"""

import contextlib
import ipaddress
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.config.options import ServerOptions
from lmi_vllm.config.settings import ServerSettings, Settings
from lmi_vllm.errors import StartupError

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0  # between two looks at the file of keys
INFERENCE: Final = "inference_address"
MANAGEMENT: Final = "management_address"
PROCESSES: Final = "LMI_FRONTEND_PROCESSES"
# Makes the TLS context of `https://` addresses; it raises StartupError.
MakeTls = Callable[[Settings, Mapping[str, str]], ssl.SSLContext]
_ADDRESS: Final = re.compile(r"(?:(https?)://)?(\[.+\]|[^:/\s]*)(?::(\d+))?/?")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """One address: a host and port, or the path of a Unix socket."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_tls(self) -> bool:
        """Whether the address begins with https."""
        return self.scheme == "https"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to it, by a port that a browser can open."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def url(self, port: int | None = None) -> str:
        """The address as text, with the bound port if it asked for any."""
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port if port is None else port}"


@dataclass(frozen=True, slots=True)
class ListenPlan:
    """The listeners to open. Without `management`, one listener has all routes."""

    inference: ListenAddress
    management: ListenAddress | None = None

    @property
    def is_tls(self) -> bool:
        """Whether one of the addresses begins with https."""
        return self.inference.is_tls or (self.management is not None and self.management.is_tls)


def is_address(text: str) -> bool:
    """Whether `read_address` can read it."""
    return text.startswith("unix:") or _ADDRESS.fullmatch(text) is not None


def read_address(text: str, name: str = INFERENCE) -> ListenAddress:
    """Return the address in `text`; the defaults are http and LMI's ports 8080 and 8081.

    With https LMI's default ports are 8443 and 8444.

    Raises:
        ValueError: it is no address; another one must never open instead.
    """
    if text.startswith("unix:"):
        return ListenAddress("unix", path=text.removeprefix("unix:"))
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ValueError(f"{text} is no address")
    scheme, host, port = match.groups()
    first = (8443 if scheme == "https" else 8080) + (name == MANAGEMENT)
    return ListenAddress(
        scheme or "http", (host or "127.0.0.1").strip("[]"), int(port) if port else first
    )


def listen_plan(server: ServerOptions) -> ListenPlan:
    """Return the listeners that the settings ask for."""
    inference = read_address(server.inference_address)
    configured = server.management_address
    management = read_address(configured, MANAGEMENT) if configured else inference
    is_one = management == inference and bool(inference.port or inference.path)  # 0: any free port
    shared = not configured or is_one
    return ListenPlan(inference, None if shared else management)


def check_listen(server: ServerSettings, fail: Callable[[str], None]) -> None:
    """Report two listeners with the same port."""
    plan = listen_plan(server)
    one, two = plan.inference, plan.management
    if two is not None and one.port and (one.host, one.port) == (two.host, two.port):
        fail(
            f"{server.details.management_address.stated} and "
            f"{server.details.inference_address.stated} share a port but not their scheme"
        )


def listener_tls(
    settings: Settings, environ: Mapping[str, str], make_tls: MakeTls
) -> ssl.SSLContext | None:
    """Return the TLS context of the listeners; None if no address begins with https.

    Raises:
        StartupError: its files cannot be used.
    """
    if not listen_plan(settings.server).is_tls:
        return None
    return make_tls(settings, environ)


def api_keys(server: ServerOptions) -> tuple[str, ...]:
    """Return the API keys; without any the server is open.

    Raises:
        StartupError: the key file cannot be read, or holds no key: never an open server instead.
    """
    keys = _lines(server.lmi_api_key, server.vllm_api_key)
    if path := server.lmi_api_key_file:
        try:
            found = _lines(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is no UTF-8 text"
            raise StartupError(f"LMI_API_KEY_FILE {path}: {reason}") from error
        if not found:
            raise StartupError(f"LMI_API_KEY_FILE {path}: the file holds no key")
        keys += found
    return tuple(keys)


def _lines(*texts: str | None) -> list[str]:
    """The keys in texts, a line each: no header of a client holds a line break."""
    return [line.strip() for text in texts if text for line in text.splitlines() if line.strip()]


class RenewedKeys:
    """The API keys as their file is now, each with a number that is its own in this process.

    A key that has left the file opens nothing any more, and its number is given to no other: what
    is kept for a client is found by it. A file without a key leaves the earlier ones.
    """

    def __init__(self, server: ServerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._numbers: dict[str, int] = {}
        self._stamp = self._stamp_of_file()
        self._keys = self._numbered(api_keys(server))
        self._next_look = clock() + LOOK_SECONDS

    def __call__(self) -> tuple[tuple[int, str], ...]:
        """Return the keys that count; the file is looked at once a second at most."""
        if (now := self._clock()) >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            if (stamp := self._stamp_of_file()) != self._stamp:
                self._stamp = stamp
                self._read()
        return self._keys

    def _read(self) -> None:
        try:
            self._keys = self._numbered(api_keys(self._server))
        except StartupError as error:
            logger.error("%s; the earlier keys count", error.text)
        else:
            logger.info("LMI_API_KEY_FILE was renewed: %d keys count", len(self._keys))

    def _numbered(self, keys: Iterable[str]) -> tuple[tuple[int, str], ...]:
        numbers = self._numbers
        return tuple((numbers.setdefault(key, len(numbers)), key) for key in keys)

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        """What changes when the file is written or replaced; None if it is not there."""
        with contextlib.suppress(OSError):
            state = Path(self._server.lmi_api_key_file or "").stat()
            return state.st_mtime_ns, state.st_size, state.st_ino
        return None


def listener_errors(
    settings: Settings, environ: Mapping[str, str], make_tls: MakeTls
) -> tuple[str, ...]:
    """Return the errors of the files that the listeners need."""
    errors = []
    for read in (
        lambda: api_keys(settings.server),
        lambda: listener_tls(settings, environ, make_tls),
    ):
        try:
            read()
        except StartupError as error:
            errors.append(error.text)
    return tuple(error for error in errors if error not in settings.errors)
