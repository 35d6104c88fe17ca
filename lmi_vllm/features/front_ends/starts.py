"""How the other front-end processes begin: forked by their template, or spawned."""

import asyncio
import contextlib
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
    Kind,
    Message,
    fork_template,
)

logger = logging.getLogger(__name__)

# A forked process has everything imported. One that takes longer waits for what it cannot get.
BEGIN_SECONDS: Final = 60.0


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
            OSError: there is no room for another process.
        """
        self.has_ended = False
        self._pid, self._control = fork_template()
        self._asked: deque[asyncio.Future[int]] = deque()
        self._running: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_reader(self._control, self._read)

    async def fork(self, end: socket.socket) -> "ForkedFrontEnd":
        """Return a new front end over one end of its channel.

        Raises:
            NotForkedError: it could not.
        """
        forked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._asked.append(forked)
        self._send(Message(Kind.FORK), end.fileno())
        if (pid := await forked) == NOT_FORKED:
            raise NotForkedError
        return ForkedFrontEnd(pid, self, self._running[pid])

    def ask(self, message: Message) -> None:
        """Ask it to kill a front end, or to tell its end; nothing where both have ended."""
        with contextlib.suppress(NotForkedError):
            self._send(message)

    def close(self) -> None:
        """End it, and with it every front end that it has forked; may be called twice."""
        if self.has_ended:
            return
        self.has_ended = True
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        os.kill(self._pid, signal.SIGKILL)  # our child: its number is its own until the next line
        os.waitpid(self._pid, 0)
        for forked in self._asked:
            if not forked.done():
                forked.set_exception(NotForkedError())
        for ended in self._running.values():  # the kernel ends them with it
            if not ended.done():
                ended.set_result(-signal.SIGKILL)

    def _send(self, message: Message, *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [message.packed()], descriptors)
        except OSError as error:
            self._lose()
            raise NotForkedError from error

    def _read(self) -> None:
        try:
            text = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            text = b""
        if not text:
            self._lose()
            return
        message = Message.read(text)
        if message.kind is Kind.FORKED:
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._running[message.pid] = ended
            if not (forked := self._asked.popleft()).done():
                forked.set_result(message.pid)
            else:  # who asked is gone
                self.ask(Message(Kind.KILL, message.pid))
                self.ask(Message(Kind.WAIT, message.pid))
        elif not (ended := self._running.pop(message.pid)).done():
            ended.set_result(message.code)

    def _lose(self) -> None:
        if not self.has_ended:
            logger.warning("the template of front-end processes has ended: others are spawned")
            self.close()


class ForkedFrontEnd:
    """A front end that the template has forked, and waits for."""

    def __init__(self, pid: int, template: Template, ended: "asyncio.Future[int]") -> None:
        self.pid = pid
        self.ended = ended  # its exit code, once `wait` was called
        self._template = template

    def kill(self) -> None:
        """Have the template send SIGKILL: it knows whether the number is still this process's."""
        self._template.ask(Message(Kind.KILL, self.pid))

    async def wait(self) -> int:
        """Return the exit code once it has ended; see `FrontEndChild.wait`."""
        self._template.ask(Message(Kind.WAIT, self.pid))
        return await asyncio.shield(self.ended)


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
    """End a forked process that does not begin, and the template: so would the next one not."""
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
        template.close()


async def _spawn(end: socket.socket) -> FrontEndChild:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", PROGRAM, str(end.fileno()), str(os.getpid()),
        pass_fds=(end.fileno(),), stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first process: it drains
    )  # fmt: skip
