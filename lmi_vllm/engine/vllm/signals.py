"""Signals of the engine's processes: SIGTERM and SIGINT end one only if its parent sends them.

systemd, Slurm and the end of a session send SIGTERM to every process of a service. vLLM's engine
then aborts what runs, while the server still drains. So the thread that is the parent of all engine
processes blocks both signals, and they inherit that. In each of them a thread waits for the signals
and reads who has sent them (Linux). The parent's are passed on to vLLM's handler.
This module imports no vLLM.
"""

import logging
import os
import signal
import threading
from collections.abc import Callable, Collection
from multiprocessing import resource_tracker
from typing import Final

logger = logging.getLogger(__name__)

_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT})
_THREAD_NAME: Final = "lmi-vllm-signals"
_NOBODY: Final = 0  # the sender's number where another process namespace hides it


def block_ending_signals(*, will_spawn: bool = False) -> None:
    """Block them in this thread, and so in every process that it will start.

    Before the first process is spawned Python starts its resource tracker, and unblocks both.
    """
    if hasattr(signal, "sigwaitinfo"):
        if will_spawn:
            resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)


def heed_only_the_parent(*others: int) -> None:
    """Let a new process of the engine, in its main thread, be ended by its parent's signals only.

    Those of `others`, which are process ids, count as its parent's.

    Does nothing where the signals were not blocked from the beginning, as in processes of Ray's.
    """
    if (
        not hasattr(signal, "sigwaitinfo")
        or not signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= _ENDING
    ):
        return
    # The tracker may be started later here; with nothing to ignore, Python unblocks nothing.
    resource_tracker._IGNORED_SIGNALS = ()  # type: ignore[attr-defined]
    passed_on: list[int] = []
    wake = signal.SIGRTMIN + 5  # unused by Python, torch and vLLM; it interrupts a wait for a lock

    def handle(*_: object) -> None:
        while passed_on:
            _call_handler(passed_on.pop())

    signal.signal(wake, handle)
    main = threading.main_thread().ident

    def pass_on(number: int) -> None:
        passed_on.append(number)
        if main is not None:
            signal.pthread_kill(main, wake)

    threading.Thread(
        target=_listen,
        args=({os.getppid(), os.getpid(), *others}, pass_on),
        name=_THREAD_NAME,
        daemon=True,
    ).start()


def _listen(heeded: Collection[int], pass_on: Callable[[int], None]) -> None:
    while True:
        received = signal.sigwaitinfo(_ENDING)
        if received.si_pid in heeded:
            pass_on(received.si_signo)
            continue
        sender = received.si_pid
        logger.warning(
            "%s of %s is ignored: the server ends its engine itself",
            signal.Signals(received.si_signo).name,
            "an unknown process" if sender == _NOBODY else f"process {sender}",
        )


def _call_handler(number: int) -> None:
    """Do what the signal would do if it were not blocked."""
    handler = signal.getsignal(number)
    if callable(handler):
        handler(number, None)
    elif handler is not signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.raise_signal(number)
