"""Processes that are forked here: the thread that forks, and what they do first.

They end with their parent and close the server's sockets. This module imports no vLLM.
"""

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from lmi_vllm.engine.vllm.signals import block_ending_signals, heed_only_the_parent

TITLE: Final = "lmi-vllm::"  # as vLLM names its processes: VLLM::EngineCore
T = TypeVar("T")
START_METHOD: Final = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM's: fork or spawn; ours: forkserver
ENGINE_THREAD_NAME: Final = "lmi-vllm-engine-parent"
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_IS_LINUX: Final = sys.platform == "linux"


def new_engine_thread() -> ThreadPoolExecutor:
    """Return an executor of one thread, the parent of every engine process.

    It must live as long as the server: the kernel ends the engine with the thread that forked it.
    """
    return ThreadPoolExecutor(1, ENGINE_THREAD_NAME, initializer=block_ending_signals)


def in_own_thread(call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
    """Run a call in a thread made for it, because a hanging call could block all shared ones."""
    thread = ThreadPoolExecutor(1, "lmi-vllm-call")
    try:
        return asyncio.get_running_loop().run_in_executor(thread, call, *arguments)
    finally:
        thread.shutdown(wait=False)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    if not _IS_LINUX:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Give this process a name of ours, which `ps` shows."""
    with contextlib.suppress(ImportError):  # vLLM brings it
        from setproctitle import setproctitle  # noqa: PLC0415 (it may be missing)

        setproctitle(TITLE + name)


def close_internet_sockets() -> None:
    """Close every inherited TCP and UDP socket: our listener and our clients' connections.

    Their numbers stay taken, by the null device. The objects of the sockets are inherited, too, and
    one that is collected later would close what has its number by then: a socket of ZeroMQ, whose
    library ends the process (`No such file or directory (src/epoll.cpp:118)`).
    """
    _close_those(_is_internet)


def close_all_but(kept: Collection[int]) -> None:
    """Close every inherited descriptor that is not kept, in the same way."""
    _close_those(lambda descriptor: descriptor not in kept)


def _close_those(is_unwanted: Callable[[int], bool]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd" if _IS_LINUX else "/dev/fd"):  # noqa: PTH208 (names only)
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            os.fstat(descriptor)
            if descriptor != null and is_unwanted(descriptor):
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def _is_internet(descriptor: int) -> bool:
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError:  # no socket
        return False
    family = inherited.family
    inherited.detach()  # the descriptor stays open
    return family in (socket.AF_INET, socket.AF_INET6)


@functools.cache
def adopt_forked_engines() -> None:
    """Prepare every process forked from the engine thread, from now on."""
    forking_pid = os.getpid()

    def remember_parent() -> None:
        nonlocal forking_pid
        forking_pid = os.getpid()  # an engine process forks its workers through this hook too

    def prepare_child() -> None:
        if not threading.current_thread().name.startswith(ENGINE_THREAD_NAME):
            return
        end_with_parent(forking_pid)
        # Ctrl-C reaches a terminal's whole process group: the server drains, the engine waits.
        os.setpgrp()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)  # shared with the server's event loop
        close_internet_sockets()
        heed_only_the_parent()

    os.register_at_fork(before=remember_parent, after_in_child=prepare_child)
