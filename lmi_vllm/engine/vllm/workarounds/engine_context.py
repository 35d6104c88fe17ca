"""vLLM takes the processes of an engine from a fork server, too.

vLLM's engine core is a process of a context of multiprocessing, and vLLM asks for `fork` and
`spawn` only. A process of a fork server has the fork server's environment, from its beginning. So
the server's own goes with each one. With a CUDA context vLLM warns first that it must spawn.

Upstream: not reported that we know of. `VLLM_WORKER_MULTIPROC_METHOD=forkserver`, which its HTTP
server looks for, is refused by its list of choices.
Releases: 0.31 and later.
Shows: "Invalid value 'forkserver' for VLLM_WORKER_MULTIPROC_METHOD".
May go: when test_plain_vllm_knows_no_fork_server fails.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, Final

from lmi_vllm.engine.vllm.forks import (
    ENGINE_THREAD_NAME,
    START_METHOD,
    adopt_forked_engines,
    end_with_parent,
)

_LOGGER: Final = "vllm.utils.system_utils"
_THREADS: Final = "OMP_NUM_THREADS"


class ForkServerChild(ForkServerProcess):
    """A process of the fork server, with the environment that this one has when it is started."""

    def start(self) -> None:
        """Start it; see multiprocessing."""
        self._environment = {**os.environ, START_METHOD: "fork"}  # it forks its workers
        super().start()

    def run(self) -> None:
        """Do what vLLM wants; called in the new process."""
        _become_engine(self._environment)
        super().run()


class EngineContext(ForkServerContext):
    """The context of multiprocessing whose processes are `ForkServerChild`ren."""

    Process = ForkServerChild  # type: ignore[assignment,unused-ignore]


class OneContext:
    """What vLLM's module takes for `multiprocessing`: whatever is asked for, it has one context."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def get_context(self, method: str) -> EngineContext:
        """Return the fork server's."""
        return EngineContext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextlib.contextmanager
def without_forced_spawn() -> Iterator[None]:
    """Leave out vLLM's warning that it spawns, since it does not."""
    log = logging.getLogger(_LOGGER)
    log.addFilter(_is_not_of_spawn)
    try:
        yield
    finally:
        log.removeFilter(_is_not_of_spawn)


def _is_not_of_spawn(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("We must use the `spawn`")


def _become_engine(environment: Mapping[str, str]) -> None:
    """Give a new process what one that is forked from the server has; the plug-in does the rest."""
    end_with_parent(os.getppid())
    inherited = os.environ.get(_THREADS)
    os.environ.clear()
    os.environ.update(environment)
    if (threads := environment.get(_THREADS)) and threads != inherited:
        # vLLM sets it for the start of an engine, and torch has read it when it was imported.
        import torch  # noqa: PLC0415 (the fork server has it; the server itself need not)

        torch.set_num_threads(int(threads))
    threading.current_thread().name = ENGINE_THREAD_NAME
    adopt_forked_engines()
