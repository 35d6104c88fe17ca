"""The checks one after another: what each found, how long it took, and why one was left out."""

import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from integration import storm
from integration.client import call, wait_until
from integration.conftest import ServerProcess, start_server
from integration.gpu.machine import Machine

READY_SECONDS: Final = 300.0
CPU_READY_SECONDS: Final = 900.0
# A cold disk, and packages without compiled bytecode.
LISTENING_SECONDS: Final = 60.0
FREED_SECONDS: Final = 60.0
# MiB that a driver may hold more than before without anything of ours being left.
SLACK_MIB: Final = 64
PROMPT: Final = "The river runs"


class LeftOutError(Exception):
    """Why a check cannot be carried out on this machine."""


class OutOfTimeError(BaseException):
    """The time of the whole run is over; no `except Exception` on the way may take it."""


@dataclass(frozen=True)
class Outcome:
    """What became of one check."""

    name: str
    verdict: str  # PASS, FAIL or SKIP
    note: str
    seconds: float


@dataclass
class Suite:
    """What the checks share: the machine, a folder for logs, the size of the shape to load."""

    machine: Machine
    folder: Path
    shape: str
    environ: Mapping[str, str]
    storm_seconds: float
    levels: tuple[int, ...] = ()  # streams of `throughput`; empty: those of the machine
    idle: int = 0  # MiB in use before the first server
    outcomes: list[Outcome] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    _demo: tuple[ServerProcess, str] | None = None
    _servers: list[ServerProcess] = field(default_factory=list)
    _has_no_demo: bool = False
    _is_checking: bool = False
    _is_over: bool = False

    def end_after(self, seconds: float) -> None:
        """Cut the check that runs then, or at SIGTERM: its servers end; the report is written."""
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, self._cut)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _cut(self, *_: object) -> None:
        if self._is_over:
            return
        self._is_over = True
        for server in self._servers:  # a thread may wait for an answer of theirs
            server.kill()
        if self._is_checking:
            raise OutOfTimeError

    def run(self, name: str, check: "Callable[[Suite], str]") -> None:
        """Carry out one check; whatever it raises is its outcome, and the next one follows."""
        print(f"     {name} ...", flush=True)
        began = time.monotonic()
        try:
            if self._is_over:
                raise LeftOutError("no time was left")
            self._is_checking = True
            verdict, note = "PASS", check(self)
        except (LeftOutError, pytest.skip.Exception) as error:
            verdict, note = "SKIP", str(error)
        except OutOfTimeError:
            verdict, note = "FAIL", "cut: the time of the run was over"
        except (Exception, SystemExit, pytest.fail.Exception) as error:  # noqa: BLE001 (a result)
            (self.folder / f"{name.replace(' ', '-')}.txt").write_text(traceback.format_exc())
            verdict, note = "FAIL", f"{type(error).__name__}: {str(error)[:600]}"
        finally:
            self._is_checking = False
        outcome = Outcome(name, verdict, note, time.monotonic() - began)
        self.outcomes.append(outcome)
        print(f"{verdict} {name} | {note} ({outcome.seconds:.0f} s)", flush=True)

    def needs_gpu(self, reason: str) -> None:
        """Leave the check out where there is no device."""
        if not self.machine.has_gpu:
            raise LeftOutError(f"needs a GPU: {reason}")

    @contextmanager
    def server(self, *flags: str, **environ: str) -> "Iterator[tuple[ServerProcess, str]]":
        """A ready server of its own for the body, and its URL; killed afterwards."""
        self.end_demo()
        server = self._start(flags, environ)
        try:
            yield server, self._url(server)
        finally:
            server.kill()

    def demo(self) -> str:
        """The URL of the embedded model, whose server the checks of answers share."""
        if self._demo is None:
            if self._has_no_demo:
                raise LeftOutError("the server that it shares did not start")
            server, self._has_no_demo = self._start(("--demo",), storm.OPTIONS), True
            self._demo = server, self._url(server)
            self._has_no_demo = False
        return self._demo[1]

    def end_demo(self) -> None:
        """End the shared server: it holds memory of the device."""
        if self._demo is not None:
            self._demo[0].kill()
            self._demo = None

    def _start(self, flags: tuple[str, ...], environ: Mapping[str, str]) -> ServerProcess:
        self.wait_for_memory()
        given = {**self.environ, **environ}
        server = start_server(self.folder, *flags, "--port", "0", environ=given)
        self._servers[:] = [*(one for one in self._servers if one.process.poll() is None), server]
        return server

    def _url(self, server: ServerProcess) -> str:
        try:
            url = server.wait_for_line("Listening on ", LISTENING_SECONDS).split()[-1]
            server.wait_ready(READY_SECONDS if self.machine.has_gpu else CPU_READY_SECONDS)
        except BaseException:
            server.kill()
            raise
        return url

    def wait_for_memory(self) -> None:
        """Wait until what ran before has left the devices: vLLM refuses to start beside it."""
        if self.machine.has_gpu:
            wait_until(self._is_free, FREED_SECONDS)

    def _is_free(self) -> bool:
        return self.machine.memory_used() <= self.idle + SLACK_MIB

    def freed(self, before: int) -> str:
        """Wait until the devices hold what they held before; says so.

        Raises:
            AssertionError: memory is still in use in the end.
        """
        if not self.machine.has_gpu:
            return "no device memory to compare"
        is_free = wait_until(
            lambda: self.machine.memory_used() <= before + SLACK_MIB, FREED_SECONDS
        )
        after = self.machine.memory_used()
        assert is_free, f"{before} MiB in use before, {after} after"
        return f"{before} MiB in use before, {after} after"

    def scratch(self) -> Path:
        """Return a new folder that is removed with the others."""
        return Path(tempfile.mkdtemp(dir=self.folder, prefix="scratch-"))

    def clean(self) -> None:
        """End what still runs, and remove what is neither a log nor the report."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.end_demo()
        for folder in self.folder.glob("scratch-*"):
            shutil.rmtree(folder, ignore_errors=True)


def answer(url: str, payload: Mapping[str, Any], path: str = "/invocations") -> Any:
    """Return the JSON that a request is answered with.

    Raises:
        AssertionError: the status is not 200.
    """
    found = call(url, path, dict(payload), seconds=300)
    assert found.status == 200, f"{path} {found.status} {found.body[:400]!r}"
    return found.json()


def text_of(url: str, prompt: str = PROMPT, adapter: str = "", tokens: int = 24) -> str:
    """Return what the base model or an adapter says, greedily."""
    payload: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
    if adapter:
        payload["adapters"] = adapter
    return str(answer(url, payload)["generated_text"])
