"""A test's body with the network cut: in a network namespace that has a loopback and nothing else.

Namespaces belong to threads, and whatever a thread starts is born into its own: servers, clients
and child processes of the body all meet on that loopback.
"""

import ctypes
import errno
import socket
import subprocess
import threading
from collections.abc import Callable

import pytest

_CLONE_NEWNET = 0x40000000


def without_network(body: Callable[[], None]) -> None:
    """Run `body` where only the loopback exists; skips where that is not permitted."""
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            _leave_network()
            body()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's thread
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if outcome:
        raise outcome[0]


def _leave_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        reason = errno.errorcode.get(ctypes.get_errno(), "?")
        pytest.skip(f"needs a network namespace of its own (root): unshare failed with {reason}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with socket.socket() as probe, pytest.raises(OSError, match="unreachable"):
        probe.connect(("192.0.2.1", 80))
