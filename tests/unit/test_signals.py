"""Signals that mean nothing to the server."""

import subprocess
import sys

PROGRAM = """
import signal
signal.signal(signal.SIGUSR2, lambda *_: print("the profiler's"))
from lmi_vllm.signals import ignore_users_signals
ignore_users_signals()
signal.raise_signal(signal.SIGUSR1)
signal.raise_signal(signal.SIGUSR2)
"""


def test_a_handler_that_was_set_before_the_server_stays() -> None:
    """A profiler that starts with Python has its signal; the other one is ignored."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the profiler's\n"), done.stderr
