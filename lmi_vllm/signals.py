"""Signals before anything else is imported: the first module that a program of ours imports.

The kernel drops signals without a handler for process 1, which a container's is. So SIGTERM was
lost while the server's modules were imported, and by `fetch` always.
"""

import os
import signal
from pathlib import Path
from typing import Final, NoReturn

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
ENDING_SIGNALS: Final = (*_ENDING, signal.SIGINT)  # of a server
_IGNORED: Final = (signal.SIGUSR1, signal.SIGUSR2)
_FIRST_CODE: Final = 128  # the exit code of a process that a signal has ended, less its number
_STDERR: Final = 2


def end_on_signals(*, is_serving: bool = False) -> None:
    """Let SIGTERM and SIGHUP end this process with a line, until other handlers are set.

    So does SIGINT end a server, which has no use for Python's KeyboardInterrupt.

    The exit code is 128 and the signal's number, as a shell says it: what was to be done is not
    done. A server that has not begun ends with 0, as later. SIGHUP stays ignored below `nohup`.
    """

    def end(number: int, _: object) -> NoReturn:
        name = signal.Signals(number).name
        os.write(_STDERR, f"lmi-vllm: ended by {name}\n".encode())
        end_children()
        os._exit(0 if is_serving else _FIRST_CODE + number)

    # A shell ignores SIGINT of what a script starts with `&`. It ends a server nevertheless.
    usual = (signal.SIG_DFL, signal.default_int_handler)
    for number in ENDING_SIGNALS if is_serving else _ENDING:
        before = signal.getsignal(number)
        if before in usual or (number, before) == (signal.SIGINT, signal.SIG_IGN):
            signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # what came before this is handled now


def ignore_users_signals() -> None:
    """Ignore SIGUSR1 and SIGUSR2, which mean nothing here, in this process and those it starts.

    A handler that was set before us stays: a profiler's, or a debugger's.
    """
    for number in _IGNORED:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)


def end_children() -> None:
    """Kill every process that this one started (Linux); their children follow."""
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = [*map(int, listing.read_text(encoding="ascii").split())]
        except OSError:  # the thread has just ended
            continue
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
