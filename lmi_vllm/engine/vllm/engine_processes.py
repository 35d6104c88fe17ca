"""The processes of an engine that was started here: which of them ended first, and how.

vLLM's engine core sees at once that a worker has ended. It then ends the others, which takes up to
nine seconds, and only after that it says that it is dead: requests wait, and health stays good. So
the server holds a descriptor of each worker (Linux). How a worker ended is told to its parent only:
the engine core writes it to a file (`processes.RootCauseFilter`).
"""

import asyncio
import contextlib
import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from lmi_vllm.engine.deaths import ENGINE_DIED, FORK_SERVER_ENDED, OomKills, ended_so
from lmi_vllm.engine.vllm.processes import read_last_cause, read_worker_end, worker_ends
from lmi_vllm.engine.vllm.workarounds.engine_context import ForkServerChild
from lmi_vllm.private_folders import SHARED_MEMORY, PrivateFolder

logger = logging.getLogger(__name__)

_WORKER: Final = "::Worker"  # in the title that vLLM gives a worker's process, after its prefix
# What multiprocessing.shared_memory names its files, at the end of a line of /proc/PID/maps.
_SHARED: Final = re.compile(r"/dev/shm/psm_[0-9a-f]+$", re.MULTILINE)
# The number of a semaphore's file there: glibc maps it under another name, and links it afterwards.
_SEMAPHORE: Final = re.compile(r" (\d+) +/dev/shm/sem\.\w+ \(deleted\)$", re.MULTILINE)
_MILLISECONDS: Final = 1000
_TOLD_SECONDS: Final = 0.5  # until an engine core that lives has told how its worker ended
_UNKNOWN_CODE: Final = 255  # multiprocessing's, of a process whose fork server has ended
_POLL_SECONDS: Final = 0.02
_NOTE_SECONDS: Final = 2.0
_LONGEST_CAUSE: Final = 700  # characters


class _Worker(NamedTuple):
    title: str
    pid: int
    descriptor: int  # of the process: readable once it has ended; its parent does not matter


class EngineProcesses:
    """Engine cores, which are this process's children, and their workers."""

    def __init__(self, cores: Sequence[Any], oom_kills: OomKills, errors: Path) -> None:
        self._cores = tuple(cores)
        self._oom_kills = oom_kills
        self._errors = errors  # what they log as exceptions
        self._worker_ends = worker_ends(errors)
        self._workers: list[_Worker] = []
        self._ended_worker = ""
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` in this event loop when the first worker has ended; Linux only."""
        if not hasattr(os, "pidfd_open"):
            return
        self._loop = asyncio.get_running_loop()
        self._workers = [found for core in self._cores for found in _workers_of(core.pid)]
        for worker in self._workers:
            self._loop.add_reader(worker.descriptor, self._note_end, worker, on_end)

    def shared_memory(self) -> set[str]:
        """Return the files of memory that cores and workers share; a Python process made them.

        Its helper removes them after the process, unless it is killed, too.
        """
        return shared_memory_of(core.pid for core in self._cores)

    @property
    def has_lost_a_worker(self) -> bool:
        """Whether a worker has ended before its engine core."""
        return bool(self._ended_worker)

    async def reason(self) -> str:
        """Return what has ended, and how, once the engine has died."""
        if await self._has_lost_its_fork_server():
            return FORK_SERVER_ENDED
        if not self._ended_worker:
            return await self._reason_of_a_core()
        deadline = time.monotonic() + _TOLD_SECONDS
        while (code := read_worker_end(self._worker_ends)) is None:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return ended_so(self._ended_worker, code, self._oom_kills)

    async def _has_lost_its_fork_server(self) -> bool:
        """Whether the kernel has ended it so; its workers end with it."""
        if not any(isinstance(core, ForkServerChild) for core in self._cores):
            return False
        return await self._awaited_code() == _UNKNOWN_CODE

    async def _awaited_code(self) -> int | None:
        deadline = time.monotonic() + _TOLD_SECONDS
        while (code := self._code()) is None:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return code

    async def _reason_of_a_core(self) -> str:
        """Say what it has logged last, too, unless a signal ended it."""
        code = await self._awaited_code()
        cause = read_last_cause(self._errors) if code is None or code >= 0 else ""
        ended = ended_so(ENGINE_DIED, code, self._oom_kills)
        return ": ".join(filter(None, (ended, cause[:_LONGEST_CAUSE])))

    def _code(self) -> int | None:
        codes = (core.exitcode for core in self._cores)
        return next((code for code in codes if code is not None), None)

    def wait_workers(self, seconds: float) -> bool:
        """Return whether all workers have ended in time: they hold the device's memory. Blocks."""
        deadline, ending = time.monotonic() + seconds, select.poll()
        left = {worker.descriptor for worker in self._workers}
        for descriptor in left:
            ending.register(descriptor, select.POLLIN)
        while left and (remaining := deadline - time.monotonic()) > 0:
            for descriptor, _ in ending.poll(remaining * _MILLISECONDS):
                ending.unregister(descriptor)
                left.discard(descriptor)
        return not left

    def close(self) -> None:
        """Let go of the workers; may be called twice."""
        self._stop_watching()
        while self._workers:
            os.close(self._workers.pop().descriptor)

    def _note_end(self, worker: _Worker, on_end: Callable[[], None]) -> None:
        self._ended_worker = f"a worker of the engine died ({worker.title}, process {worker.pid})"
        self._stop_watching()
        on_end()

    def _stop_watching(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            for worker in self._workers:
                self._loop.remove_reader(worker.descriptor)


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the files of memory that these processes, and all below them, share (Linux)."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            maps = Path(f"/proc/{pid}/maps").read_text("utf-8")
            found |= set(_SHARED.findall(maps)) | _semaphores({*map(int, _SEMAPHORE.findall(maps))})
        found |= shared_memory_of(_children_of(pid))
    return found


def _semaphores(numbers: Collection[int]) -> set[str]:
    """Return the names of Python's semaphores whose files have these numbers."""
    files = SHARED_MEMORY.glob("sem.mp-*") if numbers else ()
    return {str(file) for file in files if file.stat().st_ino in numbers}


@contextlib.contextmanager
def noting_shared_memory(folder: PrivateFolder, seconds: float = _NOTE_SECONDS) -> Iterator[None]:
    """Note in `folder` what the processes share that the body starts, for it may take long."""
    is_over = threading.Event()

    def note() -> None:
        while not is_over.wait(seconds):
            with contextlib.suppress(OSError):  # a full disk ends no start
                folder.note_outside(shared_memory_of(_children_of(os.getpid())))

    noting = threading.Thread(target=note, name="lmi-vllm-shared-memory", daemon=True)
    noting.start()
    try:
        yield
    finally:
        is_over.set()
        noting.join()


def _workers_of(core: int) -> list[_Worker]:
    found = []
    for pid in _children_of(core):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
            title = line.rstrip("\0 ")
            if _WORKER in title:
                found.append(_Worker(title, pid, os.pidfd_open(pid)))
        except OSError as error:  # it has just ended, or the kernel has no such descriptors
            logger.debug("process %d cannot be watched: %s", pid, error)
    return found


def _children_of(pid: int) -> list[int]:
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, listing.read_text(encoding="ascii").split())
        except OSError:  # the thread has just ended
            continue
    return found
