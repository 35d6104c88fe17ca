"""The template of front-end processes: it has imported everything, and forks them on request.

The server forks it before its engine starts. It has one thread, and nothing of the server's that a
fork does not survive: no event loop, no socket, no handler of signals. So it can fork another
front end hours later, when the server has threads and connections.

A front end is forked by a process that ends at once, and the kernel hands it to the server: so it
is the server's own child, and does not depend on the template.
"""

import asyncio
import contextlib
import contextvars
import gc
import importlib
import logging
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing import resource_tracker
from typing import Final, NoReturn

from lmi_vllm.engine.vllm.factory import renew_random_numbers
from lmi_vllm.engine.vllm.forks import close_all_but, end_with_parent, name_process
from lmi_vllm.signals import ENDING_SIGNALS

PROGRAM: Final = "lmi_vllm.features.front_ends.process"
TEMPLATE_NAME: Final = "front-end-template"
FRONT_END_NAME: Final = "front-end"
NOT_FORKED: Final = -1  # instead of a process id: there is no room for another
REQUEST: Final = b"f"  # to the template, with a descriptor: the new process's end of its channel
REPLY: Final = struct.Struct("!i")  # its process id, once it is the server's child
_HANDED_OVER_SECONDS: Final = 0.001  # between two looks at whose child a new process is
_STANDARD: Final = (0, 1, 2)


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
    name_process(TEMPLATE_NAME)
    if (found := _serve(control)) is None:
        return
    channel, parent = found
    while os.getppid() == parent:  # it is about to end
        time.sleep(_HANDED_OVER_SECONDS)
    end_with_parent(server)
    os.setsid()
    name_process(FRONT_END_NAME)
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
    for number in ENDING_SIGNALS:
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


def _serve(control: socket.socket) -> tuple[int, int] | None:
    """Fork as the server asks; returns None once the server is gone.

    In each new process it returns the descriptor that came with the request, and the process that
    forked it.
    """
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, len(REQUEST), 1)
        if not text:
            return None
        pid, parent = _fork_apart()
        if pid == 0:
            control.close()
            return descriptors[0], parent
        os.close(descriptors[0])
        control.send(REPLY.pack(pid))


def _fork_apart() -> tuple[int, int]:
    """Fork a process that is not our child.

    Returns its process id, or NOT_FORKED, once it has been handed over. In the new process it
    returns 0 and the process that forked it.
    """
    reader, writer = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        return NOT_FORKED, 0
    if between == 0:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            pid = NOT_FORKED
        if pid != 0:
            os.write(writer, REPLY.pack(pid))
            os._exit(0)
        os.close(reader)
        os.close(writer)
        return 0, parent
    os.close(writer)
    told = os.read(reader, REPLY.size)
    os.close(reader)
    os.waitpid(between, 0)  # from here on its child is the server's
    return REPLY.unpack(told)[0] if told else NOT_FORKED, 0
