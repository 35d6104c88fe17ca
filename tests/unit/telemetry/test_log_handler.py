"""A log that is not read costs lines, never time."""

import contextlib
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Iterator

import pytest

from lmi_vllm.telemetry.log_handler import QueuedHandler, print_lines, telling, told_lines

PIPE_BYTES = 64 << 10


class Pipe:
    """A pipe with a handler at its end."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.dropped = 0
        self.handler = QueuedHandler(self.writing, self.count, most_bytes=10_000)
        self.logger = logging.Logger("x")
        self.logger.addHandler(self.handler)

    def count(self, lines: int) -> None:
        """Count dropped lines."""
        self.dropped += lines

    def lines(self) -> list[str]:
        """Read all there is, until the handler has nothing left."""
        found = bytearray()
        is_done = threading.Event()

        def read() -> None:
            while not is_done.is_set() or not found.endswith(b"end\n"):
                found.extend(os.read(self.reading, PIPE_BYTES))

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(10):  # each returns at once where nothing waits
            self.handler.flush()
        is_done.set()
        self.logger.warning("end")
        reader.join(30)
        assert not reader.is_alive()
        return found.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe that nothing reads yet."""
    pipe = Pipe()
    yield pipe
    os.close(pipe.reading)


def test_lines_come_in_order(pipe: Pipe) -> None:
    """Those of several threads whole; nothing is dropped where there is a reader."""
    for number in range(50):
        pipe.logger.info("line %d", number)
    assert pipe.lines() == [*(f"line {number}" for number in range(50)), "end"]
    assert pipe.dropped == 0


def test_reader_that_stops_costs_lines_only(pipe: Pipe) -> None:
    """Ten times what the pipe holds is said in no time; a notice stands where lines lack."""
    since = time.monotonic()
    total = 1000
    for number in range(total):
        pipe.logger.info("%d %s", number, "x" * 700)
    assert time.monotonic() - since < 15
    assert pipe.dropped > total // 2
    *lines, end = pipe.lines()
    assert end == "end"
    following = 0  # the writer may be late on a busy machine, and drop in several places
    for line in lines:
        number, text = line.split(maxsplit=1)
        if text == "lines of the log were dropped: what reads it had stopped":
            following += int(number)
        else:
            assert (int(number), text) == (following, "x" * 700)
            following += 1
    assert following == total
    assert len([line for line in lines if line.endswith("x")]) == total - pipe.dropped


def test_the_end_does_not_wait_for_a_reader_that_stopped(pipe: Pipe) -> None:
    """A process can always end."""
    for _ in range(1000):
        pipe.logger.info("x" * 700)
    since = time.monotonic()
    pipe.handler.flush()
    assert time.monotonic() - since < 12


def test_closed_reader_does_not_stop_the_server(pipe: Pipe) -> None:
    """Lines to a closed pipe are dropped, and counted."""
    os.close(pipe.reading)
    pipe.logger.info("x")
    pipe.handler.flush()
    assert pipe.dropped == 1
    pipe.reading = os.open(os.devnull, os.O_RDONLY)


def last_words(logger: logging.Logger) -> None:
    """Be a child that says something and ends at once, as an engine whose start fails."""
    logger.error("in the child")


def test_forked_child_writes_its_last_log_lines(pipe: Pipe) -> None:
    """A child has a thread of its own, writes nothing twice, and is not cut short at its end."""
    pipe.logger.info("in the parent")
    pipe.handler.flush()
    child = multiprocessing.get_context("fork").Process(target=last_words, args=(pipe.logger,))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert pipe.lines() == ["in the parent", "in the child", "end"]


def talk(logger: logging.Logger) -> None:
    """Be a child that says more than the pipe and its queue hold."""
    for _ in range(1000):
        logger.info("x" * 700)


def test_forked_child_tells_how_many_lines_it_dropped() -> None:
    """The metric is the parent's: a child's own copy of it is never read."""
    counts: list[int] = []
    told = told_lines(counts.append)
    reading, writing = os.pipe()
    logger = logging.Logger("x")
    logger.addHandler(QueuedHandler(writing, telling(told), most_bytes=10_000))
    child = multiprocessing.get_context("fork").Process(target=talk, args=(logger,))
    child.start()
    until = time.monotonic() + 30
    while sum(counts) < 800 and time.monotonic() < until:
        time.sleep(0.01)
    child.kill()
    child.join()
    assert 800 <= sum(counts) < 1000
    os.close(reading)
    os.close(writing)


def test_printed_lines_do_not_wait_for_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout that is full: the caller goes on, and the lines come when there is room."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    filled = os.write(writing, b"x" * PIPE_BYTES)
    os.set_blocking(writing, True)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        printing = threading.Thread(target=print_lines, args=("a", "b"), daemon=True)
        printing.start()
        printing.join(5)
        has_returned = not printing.is_alive()
        found = b""
        while not found.endswith(b"a\nb\n"):
            found += os.read(reading, PIPE_BYTES)
    assert has_returned
    assert len(found) == filled + 4
    os.close(reading)


WRITES_PAST_LOGGING = """
import ctypes, logging, sys
from lmi_vllm.telemetry.log_format import configure_logging
configure_logging("text", "INFO")
library = ctypes.CDLL(None)
wrote = [library.write(2, b"x" * 4096, 4096) for _ in range(512)]
logging.warning("said")
print(wrote.count(4096) < 512, flush=True)
sys.stdin.read()
print("printed", file=sys.stderr, flush=True)
"""


def ends(kind: str) -> tuple[int, int]:
    """Return the descriptors of a reader and of a writer."""
    if kind == "pipe":
        return os.pipe()
    if kind == "terminal":
        reading, writing = os.openpty()
        tty.setraw(writing)  # else line ends are changed
        return reading, writing
    first, second = socket.socketpair()
    return first.detach(), second.detach()


@pytest.mark.parametrize("kind", ["pipe", "terminal", "socket"])
def test_libraries_that_write_to_stderr_themselves_wait_for_no_reader(kind: str) -> None:
    """What they write is lost where stderr is full; lines of the log and prints are not."""
    reading, writing = ends(kind)
    child = subprocess.Popen(
        [sys.executable, "-c", WRITES_PAST_LOGGING],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing,
    )  # fmt: skip
    os.close(writing)
    killer = threading.Timer(60, child.kill)
    killer.start()
    found = b""
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"True\n"
        child.stdin.close()
        with contextlib.suppress(OSError):  # a terminal's end
            while block := os.read(reading, PIPE_BYTES):
                found += block
    killer.cancel()
    os.close(reading)
    assert found.startswith(b"x" * 4096)
    assert (found.count(b"WARNING root said\n"), found.count(b"printed\n")) == (1, 1)
