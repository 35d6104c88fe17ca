"""A start whose engine core has ended fails at once, and says how the core ended.

A core answers twice in a start: to vLLM's handshake, and then on the socket of each client. While
vLLM waits for the first answer it sees that a core has ended, but a moment before there is an exit
code. While a client waits for the second one, vLLM looks at no process. With several front ends
the clients are made after the handshake, and an answer of a core that has ended meanwhile is lost.

So a thread looks at the cores until the client is made. Where one ends it sends the client, which
still waits, a message of an engine that vLLM does not know.

Upstream: not reported that we know of.
Releases: 0.31 and later.
Shows: a start that waits for VLLM_ENGINE_READY_TIMEOUT_S, ten minutes, for a core that the kernel
killed in its last second. Where it ended earlier "Failed core proc(s): {}".
May go: when test_plain_vllm_waits_for_a_core_that_has_ended fails.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from contextvars import ContextVar
from multiprocessing.connection import wait as ready_of
from typing import Any, Final

from lmi_vllm.engine.deaths import FORK_SERVER_ENDED
from lmi_vllm.engine.vllm.workarounds.engine_context import ForkServerChild
from lmi_vllm.errors import EngineStartError

_LOOK_SECONDS: Final = 0.05
_END_SECONDS: Final = 1.0  # from the end of a pipe to that of its process
_POLL_SECONDS: Final = 0.01
# What vLLM says where it sees the end itself, and what a start says of it (start_failures.py).
_LOST: Final = "Failed core proc(s)"
_UNKNOWN_CODE: Final = 255  # multiprocessing's, of a process whose fork server has ended
_NO_ENGINE: Final = b"lost"  # those of vLLM have two bytes

_WATCH: ContextVar["CoreWatch | None"] = ContextVar("watch of a start", default=None)


def noted(resources: type) -> type:
    """Return the class of what a client holds, which tells the watch of its start what it gets."""

    class NotedResources(resources):  # type: ignore[misc,valid-type,unused-ignore]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if (watch := _WATCH.get()) is not None:
                watch.note(name, value)

    return NotedResources


class CoreWatch:
    """Looks at the cores of a start while this thread makes it; a context.

    Raises:
        RuntimeError: (at its end) the start failed for a core that ended; the text has the codes.
        EngineStartError: (at its end) the fork server ended, and its cores with it.
    """

    def __init__(self) -> None:
        self._cores: Sequence[Any] = ()
        self._address = ""
        self._over = threading.Event()
        self._lost: dict[str, int | None] = {}  # names of cores, and how they ended if it is known
        self._thread = threading.Thread(target=self._watch, name="lmi-core-watch", daemon=True)

    def note(self, name: str, value: Any) -> None:
        """Take the processes of the cores, or the socket where their client waits for them."""
        if value is None:  # with several clients each has the cores only once it is made
            return
        if name == "engine_manager":
            self._cores = getattr(value, "processes", ())
        elif name == "input_socket":
            self._address = value.last_endpoint.decode()

    def __enter__(self) -> "CoreWatch":
        _WATCH.set(self)
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        _WATCH.set(None)
        self._over.set()
        self._thread.join()
        if isinstance(error, Exception):
            if _LOST in str(error):  # vLLM was first
                self._look(0.0)
            if _UNKNOWN_CODE in self._lost.values() and any(
                isinstance(core, ForkServerChild) for core in self._cores
            ):
                raise EngineStartError(f"the engine did not start: {FORK_SERVER_ENDED}") from error
            if self._lost:
                raise RuntimeError(f"{_LOST}: {self._lost}") from error

    def _watch(self) -> None:
        while not self._over.is_set():
            if not self._cores:
                self._over.wait(_LOOK_SECONDS)
            elif self._look(_LOOK_SECONDS):
                break
        while self._lost and not self._over.is_set():
            if self._address:
                end_waiting(self._address)
                return
            self._over.wait(_LOOK_SECONDS)

    def _look(self, seconds: float) -> bool:
        """Return whether cores have ended, after this time at most; note their exit codes."""
        if self._lost:
            return True
        started = {one.sentinel: one for one in self._cores if one.pid is not None}
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            for sentinel in ready_of([*started], seconds):
                core = started[sentinel]
                self._lost[core.name] = _exit_code(core)
        # vLLM ends the others by SIGTERM when it has seen one.
        if own := {name: code for name, code in self._lost.items() if code != -signal.SIGTERM}:
            self._lost = own
        return bool(self._lost)


def _exit_code(core: Any) -> int | None:
    """Return it within _END_SECONDS; `join` would wait without a bound once the pipe has ended."""
    deadline = time.monotonic() + _END_SECONDS
    while (code := core.exitcode) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return code  # type: ignore[no-any-return,unused-ignore]


def end_waiting(address: str) -> None:
    """End by an error the waiting of a client at this address; blocks for 1 s at most.

    Nothing happens where the client does not listen there yet, or waits no more.
    """
    import zmq  # noqa: PLC0415 (it comes with vLLM)

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, _NO_ENGINE)
        socket.setsockopt(zmq.LINGER, int(_END_SECONDS * 1000))
        socket.connect(address)
        socket.send(b"")
