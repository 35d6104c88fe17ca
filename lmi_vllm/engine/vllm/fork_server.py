"""The fork server: a process that has imported vLLM, and forks engines for a server that cannot.

A server with a CUDA context, or with threads of gRPC, can fork no engine (`start_method`). A new
interpreter imports vLLM again, which is most of a restart. The fork server is Python's own, of
multiprocessing. It begins once the server has become unfit, or at once with
VLLM_WORKER_MULTIPROC_METHOD=forkserver. This module imports no vLLM.
"""

import logging
import multiprocessing
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from lmi_vllm.engine.vllm.signals import block_ending_signals
from lmi_vllm.engine.vllm.workarounds.engine_context import EngineContext

logger = logging.getLogger(__name__)

FORK, SPAWN, FORK_SERVER = "fork", "spawn", "forkserver"  # as multiprocessing names them
PRELOADED: Final = "lmi_vllm.engine.vllm.preloaded"
CHECK_SECONDS: Final = 30.0


class ForkServer:
    """The fork server of this process, which has one at most; nothing runs until it begins."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._was_tried = threading.Event()
        self._is_fit = False

    def begin(self, why_unfit: Callable[[], str] | None = None) -> None:
        """Begin in the background, at once or when there is a reason; only the first call does."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(why_unfit,), name="lmi-vllm-fork-server", daemon=True
            )
            self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether it has forked a process, and that has ended well."""
        return self._is_fit

    def wait(self) -> bool:
        """Return whether it is ready, once that is known; for one that began without a reason."""
        self._was_tried.wait()
        return self._is_fit

    def _run(self, why_unfit: Callable[[], str] | None) -> None:
        """Live as long as this process: the kernel ends the fork server with this thread."""
        pause = threading.Event()
        if why_unfit is not None:
            while not (reason := why_unfit()):
                pause.wait(CHECK_SECONDS)
            logger.info("vLLM is imported once more, for a restart of the engine: %s", reason)
        block_ending_signals(will_spawn=True)
        try:
            multiprocessing.set_forkserver_preload([PRELOADED])
            trial = EngineContext().Process(target=_end_well_with, args=(PRELOADED,))
            trial.start()
            trial.join()
            self._is_fit = trial.exitcode == 0
        except (OSError, EOFError) as error:
            logger.warning("the fork server: %s: %s", type(error).__name__, error)
        finally:
            self._was_tried.set()
        if self._is_fit:
            logger.info("a process that has imported vLLM can fork the engine's")
        else:
            logger.warning("the fork server does not fork: the engine's process will be spawned")
        while True:
            pause.wait()


class EngineParents(NamedTuple):
    """What an engine's processes are forked from: a thread of this process, or the fork server."""

    thread: ThreadPoolExecutor
    fork_server: ForkServer | None = None


def _end_well_with(module: str) -> None:
    """Show that the fork server forks, and has the module: it says nothing of one that it lacks."""
    sys.exit(module not in sys.modules)
