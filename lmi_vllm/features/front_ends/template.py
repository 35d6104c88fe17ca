"""The template of front-end processes: it has imported everything, and forks them on request.

The server forks it before its engine starts. It has one thread, and nothing of the server's that a
fork does not survive: no event loop, no socket, no handler of signals. So it can fork another
front end hours later, when the server has threads and connections.
"""

import asyncio
import contextlib
import contextvars
import gc
import importlib
import logging
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Collection
from enum import IntEnum
from multiprocessing import resource_tracker
from typing import Final, NamedTuple, NoReturn

from lmi_vllm.engine.vllm.factory import renew_random_numbers
from lmi_vllm.engine.vllm.processes import close_all_but, end_with_parent

PROGRAM: Final = "lmi_vllm.features.front_ends.process"
TITLE: Final = "lmi-vllm::"  # as vLLM names its processes: VLLM::EngineCore
TEMPLATE_NAME: Final = "front-end-template"
FRONT_END_NAME: Final = "front-end"
NOT_FORKED: Final = -1  # instead of a process id: there is no room for another
_MESSAGE: Final = struct.Struct("!iii")
_REAP_SECONDS: Final = 0.02  # between two looks at a process that was killed
_STANDARD: Final = (0, 1, 2)


class Kind(IntEnum):
    """Of a message: `FORK`, `KILL` and `WAIT` ask the template, which replies with the others."""

    FORK = 1  # with a descriptor, the new process's end of its channel
    KILL = 2
    WAIT = 3
    FORKED = 4
    ENDED = 5


class Message(NamedTuple):
    """A message to the template or from it; `pid` is a front end's."""

    kind: Kind
    pid: int = 0
    code: int = 0  # of its end, as `os.waitstatus_to_exitcode` has it

    def packed(self) -> bytes:
        """Return it as one datagram."""
        return _MESSAGE.pack(*self)

    @classmethod
    def read(cls, text: bytes) -> "Message":
        """Return the message of a datagram."""
        kind, pid, code = _MESSAGE.unpack(text)
        return cls(Kind(kind), pid, code)


def fork_template() -> tuple[int, socket.socket]:
    """Fork the template from here, the main thread; return its process id and the socket to it.

    Raises:
        OSError: there is no room for another process.
    """
    importlib.import_module(PROGRAM)  # now: no import may wait for a lock in a process to come
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    # A signal in between would be told to the server's event loop, by the inherited descriptor.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with theirs:
            pid = os.fork()
            if pid == 0:
                _run_for_good(lambda: _be_template(theirs, server, signals))
    except OSError:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    ours.setblocking(False)
    return pid, ours


def _run_for_good(run: Callable[[], object]) -> NoReturn:
    """Run and end the process: below this call are frames of the server, which it never sees."""
    code = 1
    try:
        contextvars.Context().run(run)
        code = 0
    except BaseException:  # noqa: BLE001 (what the interpreter does with it, too)
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_template(control: socket.socket, server: int, signals: Collection[int]) -> None:
    end_with_parent(server)
    os.setsid()  # Ctrl-C is for the server: it drains
    _forget_server(control.fileno())
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    _name_process(TEMPLATE_NAME)
    template = os.getpid()
    if (channel := _Forks(control).serve()) is None:
        return
    end_with_parent(template)  # the kernel ends both with the server
    os.setsid()
    _name_process(FRONT_END_NAME)
    renew_random_numbers()
    importlib.import_module(PROGRAM).run_front_end(channel)


def _forget_server(kept: int) -> None:
    """Drop what a new interpreter would not have: handlers, descriptors, streams, the event loop.

    Objects of the server stay, and nothing may collect them here.
    """
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number == signal.SIGCHLD:  # libuv's is in C
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asyncio.set_event_loop(None)
    logging.getLogger().handlers.clear()  # not closed: a thread may hold the lock of a file
    close_all_but({*_STANDARD, kept})
    with contextlib.suppress(AttributeError):  # Python's own: the server's tracker is not ours
        resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # The server's have text that it has not written, and a descriptor that is closed now.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", errors="backslashreplace", closefd=False)


class _Forks:
    """The front ends that the template has forked, and has to wait for."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: set[int] = set()
        self._waited: set[int] = set()

    def serve(self) -> int | None:
        """Fork, kill and wait as the server asks; returns None once the server is gone.

        In each new process it returns the descriptor that came with the request.
        """
        while True:
            seconds = _REAP_SECONDS if self._waited else None
            asked = select.select([self._control], [], [], seconds)[0]
            self._reap()
            if not asked:
                continue
            text, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE.size, 1)
            if not text:
                return None
            message = Message.read(text)
            if message.kind is not Kind.FORK:
                self._end(message)
            elif (pid := _fork()) == 0:
                self._control.close()
                return descriptors[0]
            else:
                os.close(descriptors[0])
                self._running |= {pid} - {NOT_FORKED}
                self._tell(Message(Kind.FORKED, pid))

    def _end(self, message: Message) -> None:
        if message.pid not in self._running:
            return  # its number may be another process's by now
        if message.kind is Kind.KILL:
            os.kill(message.pid, signal.SIGKILL)
        else:
            self._waited.add(message.pid)

    def _reap(self) -> None:
        for pid in tuple(self._waited):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._waited.remove(pid)
                self._running.remove(pid)
                self._tell(Message(Kind.ENDED, pid, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: Message) -> None:
        self._control.send(message.packed())


def _fork() -> int:
    try:
        return os.fork()
    except OSError:
        return NOT_FORKED


def _name_process(name: str) -> None:
    with contextlib.suppress(ImportError):  # vLLM brings it
        importlib.import_module("setproctitle").setproctitle(TITLE + name)
