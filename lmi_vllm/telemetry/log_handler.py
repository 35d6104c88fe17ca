"""A log handler with a writer thread and a bounded queue: a stalled reader blocks nothing.

stderr is most often a pipe of 64 KiB. When its reader stalls (a log agent, a container runtime), a
write waits. In the event loop that would stop every stream, in the engine every token.
"""

import contextlib
import logging
import multiprocessing.util
import os
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from lmi_vllm.clock import LOG_FLUSH_SECONDS

GATHER_SECONDS: Final = 0.02  # the thread's sleep after a line, so that one write takes many
PRINT_SECONDS: Final = 0.05
MAX_QUEUED_BYTES: Final = 1 << 20  # waiting lines; further ones are dropped
_ATOMIC_BYTES: Final = 4096  # PIPE_BUF: several processes write to one pipe
CLEAR: Final = "\x1b[K"  # to the end of a terminal's line: what a longer one has left there
_LATE: Final = 100  # before multiprocessing's own work at a child's end


def write_within(
    seconds: float, write: Callable[..., object], *arguments: object, **options: object
) -> None:
    """Call `write` on a thread, and wait at most this long: its reader may have stopped."""
    thread = threading.Thread(target=write, args=arguments, kwargs=options, daemon=True)
    thread.start()
    thread.join(seconds)


def print_lines(*lines: str) -> None:
    """Print lines on stdout at once, without waiting for a stalled reader.

    The short waits keep the lines of a start in order, those of the log among them.
    """
    write_within(PRINT_SECONDS, _flush_log)
    write_within(PRINT_SECONDS, print, *lines, sep="\n", file=sys.stdout, flush=True)


def _flush_log() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


def can_draw(environ: Mapping[str, str]) -> bool:
    """Whether the log goes to a terminal that moves its cursor, and plain text is not asked for."""
    is_plain = environ.get("TERM", "dumb") == "dumb" or environ.get("LMI_LOG_FORMAT") == "json"
    return sys.stderr.isatty() and not is_plain and not environ.get("NO_COLOR")


def drop_what_waits(descriptor: int) -> int:
    """Make writes fail where they would wait; return a descriptor that waits, for a handler.

    Libraries in C write to stderr past Python's logging: a warning of xgrammar's about a client's
    schema, on the event loop. Only this descriptor changes: others share the pipe or terminal.
    """
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind not in (stat.S_IFIFO, stat.S_IFSOCK) and not os.isatty(descriptor):
        return descriptor  # a file
    try:  # each has flags of its own; an open for writing alone would wait for a reader
        path, flags = f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
        waiting, dropping = os.open(path, flags), os.open(path, flags)
        os.set_blocking(waiting, True)
    except OSError:  # a socket, a pipe without a reader, another user's terminal, no /proc
        waiting, (reading, dropping) = os.dup(descriptor), os.pipe()
        os.set_blocking(dropping, False)
        threading.Thread(target=_forward, args=(reading, waiting), daemon=True).start()
    os.dup2(dropping, descriptor)
    os.close(dropping)
    return waiting


def _forward(reading: int, descriptor: int) -> None:
    """Write what comes out of a pipe, which fills while a write waits."""
    while block := os.read(reading, _ATOMIC_BYTES):
        with contextlib.suppress(OSError):
            while block:
                block = block[os.write(descriptor, block) :]


def ignore_dropped(_lines: int) -> None:
    """Ignore the number of dropped lines."""


def told_lines(count: Callable[[int], None]) -> int:
    """Return where this process and its children `tell` of lines that they dropped."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def read() -> None:
        while block := os.read(reading, _ATOMIC_BYTES):
            count(len(block))

    threading.Thread(target=read, name="lmi-vllm-dropped-lines", daemon=True).start()
    return writing


def telling(descriptor: int) -> Callable[[int], None]:
    """Return what writes a byte for each dropped line, which never waits."""

    def tell(lines: int) -> None:
        with contextlib.suppress(OSError):  # the server is gone
            os.write(descriptor, b"." * lines)

    return tell


class QueuedHandler(logging.Handler):
    """Writes lines to a file descriptor, in order; `emit` never waits for the reader.

    Lines that do not fit are dropped and passed to `count`. One line names them when the reader is
    back. A forked process has its own queue and thread.
    """

    _thread: threading.Thread | None
    _lines: deque[bytes]

    def __init__(
        self,
        descriptor: int,
        count: Callable[[int], None] = ignore_dropped,
        most_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._count = count
        self._reset()
        renew = weakref.WeakMethod(self._reset)  # the waiting lines are the parent's
        os.register_at_fork(after_in_child=lambda: (method := renew()) and method())

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line, or drop it if too many wait."""
        try:
            line = (self.format(record) + "\n").encode("utf-8", "backslashreplace")
        except Exception:  # noqa: BLE001 (logging's own rule: a bad line harms nothing)
            self.handleError(record)
            return
        # A warning may be the last line of a process.
        self.queue(line, is_urgent=record.levelno >= logging.WARNING)

    def queue(self, line: bytes, *, is_urgent: bool = False) -> None:
        """Queue one line, or drop it where too many wait."""
        with self._changed:
            if self._bytes + len(line) > self._most_bytes:
                self._dropped += 1
                self._count(1)
                return
            is_first = not self._lines
            self._lines.append(line)
            self._bytes += len(line)
            if self._thread is None:
                self._thread = self._new_thread()
            if is_urgent:
                self._is_urgent = True
            if is_first or self._is_urgent:
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, for a short time at most."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lines and not self._writes, LOG_FLUSH_SECONDS)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._lines = deque()
        self._bytes = 0
        self._dropped = 0
        self._writes = False
        self._is_urgent = False
        self._thread = None

    def _new_thread(self) -> threading.Thread:
        # A child of multiprocessing ends without logging's own flush.
        multiprocessing.util.Finalize(self, self.flush, exitpriority=_LATE)
        thread = threading.Thread(target=self._write_loop, name="lmi-vllm-log", daemon=True)
        thread.start()
        return thread

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._writes = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines)
                self._changed.wait_for(lambda: self._is_urgent, GATHER_SECONDS)
                self._is_urgent = False
                lines, self._lines, self._bytes = self._lines, deque(), 0
                dropped, self._dropped = self._dropped, 0
                self._writes = True
            if dropped:  # after the lines that waited when it began
                lines.append(self.notice(dropped))
            self._write(lines)

    def _write(self, lines: deque[bytes]) -> None:
        """Write as many lines at a time as one atomic write may have."""
        while lines:
            block = lines.popleft()
            while lines and len(block) + len(lines[0]) <= _ATOMIC_BYTES:
                block += lines.popleft()
            try:
                self.put(block)
            except OSError:  # the reader has closed the pipe
                self._count(block.count(b"\n"))

    def put(self, block: bytes) -> None:
        """Write whole lines, in the handler's thread; may take long."""
        while block:
            block = block[os.write(self._descriptor, block) :]

    def notice(self, dropped: int) -> bytes:
        """Return the line with the number of missing lines."""
        text = "%d lines of the log were dropped: what reads it had stopped"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (dropped,), None)
        return (self.format(record) + "\n").encode("utf-8", "backslashreplace")
