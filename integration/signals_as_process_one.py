"""As process 1 of a container, which has no signal but those with a handler: all end it at once."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from integration.client import wait_until
from integration.conftest import clean_environment

SPACE = ("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
SECONDS = 5.0


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.call([*SPACE, "true"]) != 0:
        pytest.skip("needs unshare, and the right to make process namespaces")


@dataclass
class Inner:
    """A program as process 1 of a namespace, seen from outside."""

    outer: "subprocess.Popen[str]"

    @property
    def process(self) -> psutil.Process:
        """Process 1."""
        found: list[psutil.Process] = []
        assert wait_until(lambda: bool(found) or bool(found.extend(self._children())), 10)
        return found[0]

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.outer.pid).children()

    def catches(self, number: signal.Signals) -> bool:
        """Whether process 1 has a handler for the signal."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def end(self, number: signal.Signals) -> str:
        """Send a signal; return what was said last, once the process is gone."""
        os.kill(self.process.pid, number)
        _, said = self.outer.communicate(timeout=SECONDS)
        return said.splitlines()[-1] if said else ""


@contextlib.contextmanager
def process_one(*words: str, module: str = "lmi_vllm", **environ: str) -> Iterator[Inner]:
    """Run a program of ours as process 1."""
    command = [*SPACE, sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command, env=clean_environment() | environ, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as outer:  # fmt: skip
        try:
            yield Inner(outer)
        finally:
            outer.kill()


@pytest.mark.parametrize("module", ["lmi_vllm", "lmi_vllm.features.image"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_serve_ends_while_it_is_imported(module: str, number: signal.Signals) -> None:
    """From the first module on: the signal is not lost in the seconds of imports."""
    with process_one("serve", "--demo", "--port", "0", module=module) as inner:
        assert wait_until(lambda: inner.catches(number), 10)
        assert inner.end(number) == f"lmi-vllm: ended by {number.name}"
        assert inner.outer.returncode == 0


def test_user_signals_change_nothing() -> None:
    """SIGUSR1 and SIGUSR2 end a process without a handler."""
    with process_one("serve", "--demo", "--port", "0", "--engine", "scripted") as inner:
        assert wait_until(lambda: inner.catches(signal.SIGTERM), 10)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(inner.process.pid, number)
        inner.end(signal.SIGTERM)
        assert inner.outer.returncode == 0


def test_fetch_ends_with_a_code_of_failure(tmp_path: Path) -> None:
    """An init container whose download was ended has not done its work."""
    with socket.create_server(("127.0.0.1", 0)) as hub:  # accepts, and never answers
        environ = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(tmp_path),
        }
        with process_one("fetch", "acme/tiny", **environ) as inner:
            hub.settimeout(20)
            connection, _ = hub.accept()
            with connection:
                assert inner.end(signal.SIGTERM) == "lmi-vllm: ended by SIGTERM"
            assert inner.outer.returncode == 128 + signal.SIGTERM
