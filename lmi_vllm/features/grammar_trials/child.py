"""A forked child that tries a grammar and answers on a pipe, or is killed."""

import asyncio
import contextlib
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lmi_vllm.engine.vllm.forks import close_internet_sockets, end_with_parent, in_own_thread

# A child's copy of the server may grow by so much. Beyond, its allocations fail, and it says so.
MEMORY_BYTES: Final = 4 << 30
PASSED: Final = b"\0"
_ANSWER_BYTES: Final = 2000


def fork_trial(attempt: Callable[[], bytes]) -> tuple[int, int]:
    """Return the child that makes the attempt and the pipe on which it will answer."""
    parent = os.getpid()
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return pid, readable
    try:  # in the child, a copy of this thread alone
        _become_child(parent)
        answer = attempt()
    except BaseException as error:  # noqa: BLE001 (it must end here, whatever it was)
        answer = str(error).encode("utf-8", "replace")[:_ANSWER_BYTES] or b"refused"
    with contextlib.suppress(OSError):
        os.write(writable, answer)
    os._exit(0)


async def wait_for_verdict(pid: int, pipe: int, seconds: float) -> str:
    """Return why the child refuses, or an empty text; the child is ended, also on cancellation."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(pipe, readable.set)
    try:
        async with asyncio.timeout(seconds):
            await readable.wait()
        answer = os.read(pipe, _ANSWER_BYTES)
    except TimeoutError:
        answer = None
    finally:
        loop.remove_reader(pipe)
        gone = end_trial(pid, pipe)
    await gone
    if answer == PASSED:
        return ""
    start = "The schema, regular expression or grammar is refused: "
    if answer is None:
        return f"{start}it does not compile within {seconds:g} s (LMI_GRAMMAR_TIMEOUT)"
    return start + (answer.decode("utf-8", "replace") or "compiling it takes too much memory")


def end_trial(pid: int, pipe: int) -> "asyncio.Future[None]":
    """Kill the child, whatever it does; the future is done when its memory is free."""
    os.close(pipe)
    os.kill(pid, signal.SIGKILL)  # it was not waited for, so no other process has its pid
    return in_own_thread(_reap, pid)


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _become_child(parent: int) -> None:
    """Close the server's descriptors, end with the server, and bound the memory."""
    os.setpgid(0, 0)
    os.nice(5)  # requests that wait for tokens come first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    close_internet_sockets()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
