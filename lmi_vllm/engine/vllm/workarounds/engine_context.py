"""vLLM takes the processes of an engine from a fork server, too.

vLLM's engine core is a process of the context that `get_mp_context` returns, and that knows `fork`
and `spawn` only. A process of a fork server has the fork server's environment, from its beginning.
So the server's own goes with each one.

Upstream: not reported that we know of. `VLLM_WORKER_MULTIPROC_METHOD=forkserver`, which its HTTP
server looks for, is refused by its list of choices.
Releases: 0.31 and later.
Shows: "Invalid value 'forkserver' for VLLM_WORKER_MULTIPROC_METHOD".
May go: when test_plain_vllm_knows_no_fork_server fails.
"""

import importlib
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, Final

from lmi_vllm.engine.vllm.forks import ENGINE_THREAD_NAME, adopt_forked_engines, end_with_parent

_THREADS: Final = "OMP_NUM_THREADS"


class ForkServerChild(ForkServerProcess):
    """A process of the fork server, with the environment that this one has when it is started."""

    def start(self) -> None:
        """Start it; see multiprocessing."""
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Do what vLLM wants; called in the new process."""
        _become_engine(self._environment)
        super().run()


class EngineContext(ForkServerContext):
    """The context of multiprocessing whose processes are `ForkServerChild`es."""

    Process = ForkServerChild  # type: ignore[assignment,unused-ignore]


def of_the_fork_server(_: Callable[[], Any]) -> Callable[[], EngineContext]:
    """Return what takes the place of `get_mp_context`."""
    return EngineContext


def _become_engine(environment: Mapping[str, str]) -> None:
    """Give a new process what one that is forked from the server has; the plug-in does the rest."""
    end_with_parent(os.getppid())
    inherited = os.environ.get(_THREADS)
    os.environ.clear()
    os.environ.update(environment)
    if (threads := environment.get(_THREADS)) and threads != inherited:
        # vLLM sets it for the start of an engine, and torch has read it when it was imported.
        importlib.import_module("torch").set_num_threads(int(threads))
    threading.current_thread().name = ENGINE_THREAD_NAME
    adopt_forked_engines()
