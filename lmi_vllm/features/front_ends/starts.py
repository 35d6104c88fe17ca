"""How the other front-end processes begin: forked by their template, or spawned."""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections import deque
from typing import Any, Final, Protocol

from lmi_vllm.engine.vllm.factory import why_not_forked
from lmi_vllm.features.front_ends.template import (
    NOT_FORKED,
    PROGRAM,
    REPLY,
    REQUEST,
    fork_template,
)

logger = logging.getLogger(__name__)

# A forked process has everything imported. One that takes longer waits for what it cannot get.
BEGIN_SECONDS: Final = 60.0
# A template that takes longer hangs: it does nothing else.
FORK_SECONDS: Final = 15.0
_UNKNOWN_CODE: Final = 255  # as asyncio has it
_PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h


class FrontEndChild(Protocol):
    """A process that was started; an `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    def kill(self) -> None:
        """Send SIGKILL.

        Raises:
            ProcessLookupError: it has ended; not always.
        """
        ...

    async def wait(self) -> int:
        """Return the exit code once it has ended; below zero it is a signal's number."""
        ...


class StartFrontEnd(Protocol):
    """Starts a process over one end of its channel."""

    async def __call__(self, end: socket.socket, has_begun: asyncio.Event) -> FrontEndChild:
        """Return the process; it sets `has_begun` through its channel once it can join."""
        ...


class NotForkedError(Exception):
    """The template has ended, or there is no room for another process."""


class Template:
    """The process that forks front ends, seen from the server."""

    def __init__(self) -> None:
        """Fork it.

        Raises:
            OSError: there is no room for another process, or the kernel has not what it takes.
        """
        os.close(os.pidfd_open(os.getpid()))
        _adopt_orphans(False)
        self.has_ended = False
        self._pid, self._control = fork_template()
        self._asked: deque[asyncio.Future[int]] = deque()
        asyncio.get_running_loop().add_reader(self._control, self._read)

    async def fork(self, end: socket.socket) -> "ForkedFrontEnd":
        """Return a new front end over one end of its channel.

        Raises:
            NotForkedError: it could not.
        """
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append(forked)
        _adopt_orphans(True)
        try:
            socket.send_fds(self._control, [REQUEST], [end.fileno()])
        except OSError:
            self._lose()
        try:
            async with asyncio.timeout(FORK_SECONDS):
                pid = await forked
        except TimeoutError:
            logger.warning("the template of front-end processes hangs: it is ended")
            self._lose()
            raise NotForkedError from None
        if pid == NOT_FORKED:
            raise NotForkedError
        try:
            return ForkedFrontEnd(pid)
        except OSError as error:  # it was not handed over, and has ended itself
            self._lose()
            raise NotForkedError from error

    def close(self) -> None:
        """End it; front ends stay. May be called twice."""
        if self.has_ended:
            return
        self.has_ended = True
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        os.kill(self._pid, signal.SIGKILL)  # our child: its number is its own until the next line
        os.waitpid(self._pid, 0)
        while self._asked:
            self._tell(NOT_FORKED)

    def _read(self) -> None:
        try:
            text = self._control.recv(REPLY.size)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if text:
            self._tell(*REPLY.unpack(text))
        else:
            self._lose()

    def _tell(self, pid: int) -> None:
        forked = self._asked.popleft()
        if not self._asked:
            _adopt_orphans(False)
        if not forked.done():
            forked.set_result(pid)
        elif pid != NOT_FORKED:  # who asked is gone
            ForkedFrontEnd(pid).kill()

    def _lose(self) -> None:
        if not self.has_ended:
            logger.warning("the template of front-end processes has ended: others are spawned")
            self.close()


def _adopt_orphans(is_wanted: bool) -> None:
    """Say whether processes below this one are handed to it when their parents end.

    Only while one is forked: other orphans would stay here, ended and never waited for.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class ForkedFrontEnd:
    """A front end that the template has forked: a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def kill(self) -> None:
        """Send SIGKILL, unless its end was seen: its number may be another's by then."""
        if not self.ended.done():
            os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return the exit code once it has ended; see `FrontEndChild.wait`."""
        return await asyncio.shield(self.ended)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # a library waits for every child of this process
            code = _UNKNOWN_CODE
        self.ended.set_result(code)


class FrontEndStarts:
    """Starts front ends: all by a template that is forked once, if this process is fit for that."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._has_begun = False
        self._watches: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Fork the template, from a process that has imported vLLM; only the first call does."""
        if self._has_begun:
            return
        self._has_begun = True
        reason = why_not_forked()
        if not reason:
            try:
                self._template = Template()
            except OSError as error:
                reason = f"fork: {error.strerror}"
        if reason:
            logger.info("front-end processes are spawned and import vLLM again: %s", reason)

    async def start(self, end: socket.socket, has_begun: asyncio.Event) -> FrontEndChild:
        """Return a new front end over one end of its channel; see `StartFrontEnd`."""
        template = self._template
        if template is None or template.has_ended:
            return await _spawn(end)
        try:
            process = await template.fork(end)
        except NotForkedError:
            return await _spawn(end)
        watch = asyncio.create_task(_end_late(process, template, has_begun))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return process

    def close(self) -> None:
        """End the template; may be called twice."""
        if self._template is not None:
            self._template.close()


async def _end_late(process: ForkedFrontEnd, template: Template, has_begun: asyncio.Event) -> None:
    """End a forked process that does not begin, and the template: the next would not, either."""
    begun = asyncio.create_task(has_begun.wait())
    waited: set[asyncio.Future[Any]] = {begun, process.ended}
    await asyncio.wait(waited, timeout=BEGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    if not has_begun.is_set() and not process.ended.done():
        logger.error(
            "front-end process %d was forked and does not begin: it is ended, and others are "
            "spawned, as with VLLM_WORKER_MULTIPROC_METHOD=spawn",
            process.pid,
        )
        process.kill()
        template.close()


async def _spawn(end: socket.socket) -> FrontEndChild:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", PROGRAM, str(end.fileno()), str(os.getpid()),
        pass_fds=(end.fileno(),), stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first process: it drains
    )  # fmt: skip
