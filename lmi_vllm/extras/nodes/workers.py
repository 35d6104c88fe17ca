"""A node behind the leader: vLLM's workers without a front end, which end when the leader goes.

vLLM's own headless ranks outlive their leader. The leader's first worker keeps torch's rendezvous
store open for as long as it lives, so one idle connection to it is the watch; it also ends when
the leader's engine restarts, whose workers these could not join.
"""

import contextlib
import socket
from typing import Any

from lmi_vllm.engine.vllm.start import start_headless_workers, starting
from lmi_vllm.extras.nodes.liveness import HELLO, connect, liveness_port, wait_for_end
from lmi_vllm.messages import EngineArguments


class Follower:
    """The workers of this node, from `start` until one of the waits returns."""

    def __init__(self, arguments: EngineArguments) -> None:
        self._arguments = arguments
        self._executor: Any = None
        self._link: Any = None  # the leader sees it end with this process

    def start(self) -> None:
        """Start the workers; returns once they and the leader's have met.

        Call it on a thread that lives as long as they: the kernel ends them with it.

        Raises:
            ConfigurationError: the installed vLLM refuses an argument.
            EngineStartError: they did not come up; the text is the root cause.
        """
        with starting(self._arguments) as is_cpu:
            self._executor = start_headless_workers(self._arguments, is_cpu=is_cpu)
            self._link = connect(self._leader, liveness_port(self._port))
            self._link.sendall(HELLO)

    def wait_for_workers(self) -> None:
        """Return when a worker has ended."""
        self._executor.start_worker_monitor(inline=True)

    def leave(self) -> None:
        """Have the leader name this node, before its engine dies of what it does not know."""
        with contextlib.suppress(OSError):  # it went first
            self._link.shutdown(socket.SHUT_RDWR)

    def wait_for_leader(self) -> None:
        """Return when the leader, or its engine, has gone."""
        with connect(self._leader, self._port) as store:
            wait_for_end(store)

    @property
    def _leader(self) -> str:
        return str(self._arguments.values["master_addr"])

    @property
    def _port(self) -> int:
        return self._arguments.number("master_port", 0)
