"""Where the server listens: addresses, which of them speak TLS, and with which files.

`https://` needs a PEM pair, and another management address is a second listener that has only the
management routes. The files themselves are read when the port opens (checks/listener_files.py).
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lmi_vllm.config.options import ServerOptions
from lmi_vllm.config.setting import Setting

INFERENCE: Final = "inference_address"
MANAGEMENT: Final = "management_address"
TLS_FILES: Final = ("certificate_file", "private_key_file")
PROCESSES: Final = "LMI_FRONTEND_PROCESSES"
_NAMES: Final = (INFERENCE, MANAGEMENT, *TLS_FILES)


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
        """Whether only this machine reaches it, by a port that a browser can open."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def url(self, port: int | None = None) -> str:
        """The address as text, with the port that was bound where it asked for any."""
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port if port is None else port}"


@dataclass(frozen=True, slots=True)
class ListenPlan:
    """What to open. Without `management`, one listener has all routes."""

    inference: ListenAddress
    management: ListenAddress | None = None
    certificate_file: str = ""
    private_key_file: str = ""

    @property
    def is_tls(self) -> bool:
        """Whether one of the addresses begins with https."""
        return self.inference.is_tls or (self.management is not None and self.management.is_tls)


def read_address(text: str, name: str = INFERENCE) -> ListenAddress:
    """Return what `text` names; left out are http, and upstream's ports 8080 and 8081.

    With https upstream's ports are 8443 and 8444.
    """
    if text.startswith("unix:"):
        return ListenAddress("unix", path=text.removeprefix("unix:"))
    match = re.fullmatch(r"(?:(https?)://)?(\[.+\]|[^:/]*)(?::(\d+))?/?", text)
    if match is None:
        return ListenAddress("http", "127.0.0.1", 8080)
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
    certificate, key = server.certificate_file or "", server.private_key_file or ""
    is_one = management == inference and bool(inference.port or inference.path)  # 0: any free port
    shared = not configured or is_one
    return ListenPlan(inference, None if shared else management, certificate, key)


def check_listen(server: Mapping[str, Setting], fail: Callable[[str], None]) -> None:
    """Report addresses and TLS files that do not go together."""
    # What could not be read is an error already, and missing here.
    given = {name: server[name] for name in _NAMES if name in server and server[name].value}
    addresses = {
        name: read_address(str(setting.value), name)
        for name, setting in given.items()
        if name not in TLS_FILES
    }
    _check_ports(server, addresses, fail)
    secure = [name for name, address in addresses.items() if address.is_tls]
    for name in secure:
        for missing in (file for file in TLS_FILES if file not in given):
            fail(f"{server[name].stated} needs {missing}, a PEM file")
    if secure:
        return
    for name in (file for file in TLS_FILES if file in given):
        fail(
            f"{server[name].label} has no effect: neither {INFERENCE} nor {MANAGEMENT} begins "
            "with https://"
        )


def _check_ports(
    server: Mapping[str, Setting],
    addresses: Mapping[str, ListenAddress],
    fail: Callable[[str], None],
) -> None:
    """Two listeners cannot share a port."""
    inference, management = addresses.get(INFERENCE), addresses.get(MANAGEMENT)
    if inference is None or management is None or management == inference:
        return
    if inference.port and (inference.host, inference.port) == (management.host, management.port):
        fail(
            f"{server[MANAGEMENT].stated} and {server[INFERENCE].stated} share a port but not "
            "their scheme"
        )
