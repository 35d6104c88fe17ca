"""What serves requests is imported while the engine's process loads the model.

These are 130 modules, most of vLLM's HTTP layer, that the engine needs nothing of. No thread may
import while a process is forked: the lock of a module would stay locked in the new process. So the
import begins after the fork, and has ended before the server goes on. Where there is none, or
several, it follows the start of the engine.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

from lmi_vllm.engine.factory import imports_without_collections
from lmi_vllm.engine.vllm.forks import ENGINE_THREAD_NAME

FRONT_END: Final = "lmi_vllm.engine.vllm.engine"
# What waits for the next fork of the engine thread, and the process that it is to happen in.
_waiting: list[tuple[int, Callable[[], None]]] = []


def import_front_end() -> None:
    """Import what serves requests, unless it is there.

    Raises:
        ImportError: this release of vLLM lacks something of it.
    """
    with imports_without_collections():
        importlib.import_module(FRONT_END)


@contextlib.contextmanager
def after_the_fork(call: Callable[[], object]) -> Iterator[None]:
    """Call in a thread, once the body has forked a process; the body ends after the call.

    An exception of the call is left to who makes it again.
    """
    _heed_forks()

    def run() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=run, name="lmi-vllm-beside", daemon=True)
    mine = (os.getpid(), thread.start)
    _waiting.append(mine)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # no process was forked
            _waiting.remove(mine)
        if thread.ident is not None:
            thread.join()


@functools.cache
def _heed_forks() -> None:
    os.register_at_fork(after_in_parent=_begin)


def _begin() -> None:
    """Begin what waits for this; an engine core that forks its workers has inherited it."""
    if not threading.current_thread().name.startswith(ENGINE_THREAD_NAME):
        return
    if _waiting and _waiting[-1][0] == os.getpid():
        _waiting.pop()[1]()
