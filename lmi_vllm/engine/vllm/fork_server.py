"""The fork server: a process that has imported vLLM, and forks engines for a server that cannot.

A server with a CUDA context, or with threads of gRPC, can fork no engine (`start_method`). A new
interpreter imports vLLM again, which is most of a restart. The fork server is Python's own, of
multiprocessing. It begins once the server has become unfit, or at once with
VLLM_WORKER_MULTIPROC_METHOD=forkserver. This module imports no vLLM.
"""

import logging
import multiprocessing
import os
import select
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

from lmi_vllm.engine.deaths import how_ended
from lmi_vllm.engine.vllm.signals import block_ending_signals
from lmi_vllm.engine.vllm.workarounds.engine_context import EngineContext
from lmi_vllm.private_folders import SHARED_MEMORY, PrivateFolder, new_private_folder

logger = logging.getLogger(__name__)

FORK, SPAWN, FORK_SERVER = "fork", "spawn", "forkserver"  # as multiprocessing names them
# Those that a server can be asked for; the watch over the fork server takes Linux.
METHODS: Final = (FORK, SPAWN, *((FORK_SERVER,) if hasattr(os, "pidfd_open") else ()))
PRELOADED: Final = "lmi_vllm.engine.vllm.preloaded"
CHECK_SECONDS: Final = 30.0
MAX_FAILURES: Final = 3  # in a row


class ForkServer:
    """The fork server of this process, which has one at most; nothing runs until it begins."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_known = threading.Event()  # whether there is one; not set while one begins
        self._lock = threading.Lock()
        self._folder: PrivateFolder | None = None  # held until this process ends
        self._descriptor: int | None = None  # of its process, once that has forked another one

    def begin(self, why_unfit: Callable[[], str] | None = None) -> None:
        """Begin in the background, at once or when there is a reason; only the first call does."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(why_unfit,), name="lmi-vllm-fork-server", daemon=True
            )
            self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether its process has forked another one, and has not ended."""
        with self._lock:
            return self._descriptor is not None and not _has_ended(self._descriptor, wait=False)

    def wait(self) -> bool:
        """Return whether it is ready, once that is known; for one that began without a reason."""
        self._is_known.wait()
        return self.is_ready

    def _run(self, why_unfit: Callable[[], str] | None) -> None:
        """Live as long as this process: the kernel ends the fork server with this thread.

        So no other thread may begin it, which Python does for a process to start if it has ended.
        """
        pause = threading.Event()
        if why_unfit is not None:
            while not (reason := why_unfit()):
                pause.wait(CHECK_SECONDS)
            logger.info("vLLM is imported once more, for a restart of the engine: %s", reason)
        failures = 0
        try:
            block_ending_signals(will_spawn=True)
            self._folder = _made_folder()
            multiprocessing.set_forkserver_preload([PRELOADED])
            while failures < MAX_FAILURES:
                if pid := _begin_and_try():
                    failures = 0
                    self._watch(pid)
                else:
                    failures += 1
        except OSError as error:  # no room for its folder, or a kernel without such descriptors
            logger.warning("the fork server: %s", error)
        finally:
            self._is_known.set()
        logger.warning("the fork server does not fork: the engine's process will be spawned")
        while True:
            pause.wait()

    def _watch(self, pid: int) -> None:
        with self._lock:
            self._descriptor = descriptor = os.pidfd_open(pid)
        self._is_known.set()
        logger.info("the fork server, process %d, can fork the engine's", pid)
        _has_ended(descriptor, wait=True)
        self._is_known.clear()
        with self._lock:
            self._descriptor = None
            os.close(descriptor)
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ended = how_ended(-seen.si_status) if seen and seen.si_code != os.CLD_EXITED else "ended"
        logger.error("the fork server, process %d, was %s, and its engine with it", pid, ended)


class EngineParents(NamedTuple):
    """What an engine's processes are forked from: a thread of this process, or the fork server."""

    thread: ThreadPoolExecutor
    fork_server: ForkServer | None = None


def _made_folder() -> PrivateFolder:
    """Return the folder of the fork server's socket: it is removed, and its path is short enough.

    multiprocessing makes one folder in that of temporary files, once in a process.
    """
    folder = new_private_folder("lmi-vllm-fork-server-", notes_in=SHARED_MEMORY)
    before = tempfile.tempdir
    tempfile.tempdir = str(folder.for_sockets or folder.path)
    try:
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before
    return folder


def _begin_and_try() -> int:
    """Return the process id of a fork server that has forked and has its modules; 0 without one."""
    try:
        context = EngineContext()
        ours, theirs = context.Pipe(duplex=False)
        trial = context.Process(target=_tell_parent, args=(theirs, PRELOADED))
        trial.start()
        theirs.close()
        trial.join()
        return int(ours.recv())
    except (OSError, EOFError) as error:
        logger.warning("the fork server: %s: %s", type(error).__name__, error)
    return 0


def _tell_parent(told: Connection, module: str) -> None:
    """Say who forked this, unless it lacks the module: the fork server itself says nothing then."""
    if module not in sys.modules:
        sys.exit(f"the fork server could not import {module}")
    told.send(os.getppid())


def _has_ended(descriptor: int, *, wait: bool) -> bool:
    ending = select.poll()
    ending.register(descriptor, select.POLLIN)
    return bool(ending.poll(None if wait else 0))
