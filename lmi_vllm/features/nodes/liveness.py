"""Liveness of the nodes of one engine: the leader notices a lost follower, also while idle.

vLLM's leader notices at the next step only: gloo's connections are not read in between. Each
follower keeps one connection to the port after `master_port` and sends `HELLO`, so that a port scan
is not taken for one. When a connection ends, the leader ends its engine, and is supervised as after
any other death of an engine.
This module imports no vLLM.
"""

import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import ConfigurationError
from lmi_vllm.features.nodes.cluster import MASTER_PORT, cluster_exports, node_rank
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.signals import end_children

logger = logging.getLogger(__name__)

HELLO: Final = b"lmi-vllm follows\n"
_KEEPALIVE: Final = {  # a lost machine closes nothing: it is noticed after 10 + 3 x 5 s
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
}


def start_variables(
    settings: Settings,
    model: ModelArtifacts,
    arguments: EngineArguments,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Return `cluster_exports`; on a leader, start the liveness checks of its followers.

    Raises:
        ConfigurationError: the leader cannot be resolved, or cannot listen for its followers.
    """
    _ = settings, model
    exports = cluster_exports(arguments, environ)
    if arguments.number("nnodes", 1) > 1 and node_rank(arguments) == 0:
        address = environ.get("VLLM_HOST_IP") or exports["VLLM_HOST_IP"]
        port = liveness_port(arguments.number("master_port", MASTER_PORT))
        try:
            watch_followers(address, port)
        except OSError as error:
            text = f"{address}:{port}, where the leader listens for its followers: {error.strerror}"
            raise ConfigurationError([text]) from error
    return exports


def liveness_port(master_port: int) -> int:
    """Return the port of the leader that followers keep a connection to."""
    return master_port + 1


@functools.cache
def watch_followers(address: str, port: int) -> None:
    """Listen in a thread, and end the engine when a follower is lost; once for each address.

    Raises:
        OSError: the address cannot be bound.
    """
    listener = socket.create_server((address, port))
    threading.Thread(target=_accept, args=(listener,), daemon=True, name="node-liveness").start()


def connect(address: str, port: int) -> socket.socket:
    """Return a connection to the leader, with keep-alive so that the loss of its machine ends it.

    Raises:
        OSError: nothing listens there.
    """
    connection = socket.create_connection((address, port))
    _keep_alive(connection)
    return connection


def wait_for_end(connection: socket.socket) -> None:
    """Wait until the other end closes the connection, or it breaks."""
    try:
        while connection.recv(64):
            pass
    except OSError as error:
        logger.info("the connection to another node broke: %s", error)


def _accept(listener: socket.socket) -> None:
    while True:
        connection, address = listener.accept()
        threading.Thread(target=_watch, args=(connection, address[0]), daemon=True).start()


def _watch(connection: socket.socket, node: str) -> None:
    with connection:
        _keep_alive(connection)
        try:
            hello = connection.recv(len(HELLO), socket.MSG_WAITALL)
        except OSError:
            return
        if hello != HELLO:
            return
        wait_for_end(connection)
    logger.error("node %s has gone: the engine is killed", node)
    end_children()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Follower:
    """The workers of this node, and its connection to the leader."""

    def __init__(self, arguments: EngineArguments) -> None:
        self._arguments = arguments
        self._executor: Any = None
        self._link: Any = None  # it closes with this process, which the leader notices

    def start(self) -> None:
        """Start the workers; returns once they have completed the rendezvous with the leader's.

        Call it on a thread that outlives them: the kernel ends them with it.

        Raises:
            ConfigurationError: the installed vLLM refuses an argument.
            EngineStartError: they did not start; the text is the root cause.
        """
        from lmi_vllm.engine.vllm.start import (  # noqa: PLC0415 (imports vLLM)
            start_headless_workers,
            starting,
        )

        with starting(self._arguments) as is_cpu:
            self._executor = start_headless_workers(self._arguments, is_cpu=is_cpu)
            self._link = connect(self._leader, liveness_port(self._port))
            self._link.sendall(HELLO)

    def wait_for_workers(self) -> None:
        """Wait until a worker ends."""
        self._executor.start_worker_monitor(inline=True)

    def leave(self) -> None:
        """Close the connection to the leader, which then names this node in its log."""
        with contextlib.suppress(OSError):  # the leader has closed it
            self._link.shutdown(socket.SHUT_RDWR)

    def wait_for_leader(self) -> None:
        """Wait until the leader, or its engine, ends."""
        with connect(self._leader, self._port) as store:
            wait_for_end(store)

    @property
    def _leader(self) -> str:
        return str(self._arguments.values["master_addr"])

    @property
    def _port(self) -> int:
        return self._arguments.number("master_port", 0)
