"""Joins the other front-end processes to the engine: together when it has started, or later."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace

from lmi_vllm.features.front_ends.channel import JoinEngine
from lmi_vllm.features.front_ends.first import EngineClients, FirstProcess
from lmi_vllm.features.front_ends.handle import FrontEnd, ProcessEndedError
from lmi_vllm.features.front_ends.hanging import (
    FIRST_JOIN_SECONDS,
    IMPORT_SECONDS,
    LATER_JOIN_SECONDS,
    ended_after,
)

logger = logging.getLogger(__name__)

BeginTask = Callable[[Coroutine[object, object, None]], "asyncio.Task[None]"]


class Joining:
    """Joins processes to the engine of the first one; each is routed to, then told of its state."""

    def __init__(
        self,
        processes: Sequence[FrontEnd],
        count: int,
        first: FirstProcess,
        clients: EngineClients,
        begin_task: BeginTask,
    ) -> None:
        """Take the list of the processes, which changes, and how many there should be with ours."""
        self._processes = processes
        self._count = count
        self._first = first
        self._clients = clients
        self._begin_task = begin_task
        self._message: JoinEngine | None = None  # but for the client; None: there is no engine
        self._joined = asyncio.Event()  # by one more process
        self._has_joined = False  # all of them have, an engine before the next one

    def begin(self, message: JoinEngine) -> None:
        """Let processes join the engine of this message from now on."""
        self._message = message

    def end(self) -> None:
        """Let none join the engine any more."""
        self._message = None

    async def join_all(self) -> None:
        """Return once all processes serve, also those that took the place of others.

        Requests wait for an engine after the first, LATER_JOIN_SECONDS at most. Those that still
        import vLLM, or take longer, join it later.
        """
        if self._has_joined:
            joining = {self._begin_task(self._join_or_end(one)): one for one in self._processes}
            if awaited := [task for task, one in joining.items() if one.imported.is_set()]:
                await asyncio.wait(awaited, timeout=LATER_JOIN_SECONDS)
            if late := [task for task in joining if not task.done()]:
                self._begin_task(self._log_late(late))
            return
        await asyncio.gather(*map(self._join_or_end, self._processes))
        while self._serving < self._count - 1:
            self._joined.clear()
            await self._joined.wait()
        self._has_joined = True

    async def join_late(self, process: FrontEnd) -> None:
        """Let a process that took the place of another join, if there is an engine."""
        await self._join_or_end(process)
        if process.is_serving.is_set():
            self.log_count()

    def log_count(self) -> None:
        """Log how many processes answer."""
        if self._message is None:
            return
        count, url = 1 + self._serving, self._message.address.url()
        missing = f" of {self._count}" if count < self._count else ""
        logger.info("%d%s front-end processes answer at %s", count, missing, url)

    @property
    def _serving(self) -> int:
        return sum(one.is_serving.is_set() for one in self._processes)

    async def _log_late(self, late: Collection["asyncio.Task[None]"]) -> None:
        joined, serving = self._message, self._serving
        await asyncio.wait(late)
        if self._message is joined and self._serving != serving:
            self.log_count()

    async def _join_or_end(self, process: FrontEnd) -> None:
        with contextlib.suppress(ProcessEndedError):  # who runs it logs that and replaces it
            await self._join(process)

    async def _join(self, process: FrontEnd) -> None:
        """Let a process join the engine; returns at once where there is none yet."""
        await ended_after(IMPORT_SECONDS, process, process.wait_for(process.imported))
        joined, engine = self._message, self._first.engine
        if joined is None or engine is None or process.is_asked:
            return
        client = engine.complete(self._clients.of(process.row))
        await ended_after(FIRST_JOIN_SECONDS, process, process.join(replace(joined, client=client)))
        if self._message is not joined:
            return  # the engine has been left meanwhile
        process.is_routed = True
        await process.send_adapters(self._first.adapters, engine.shared_adapters, 0.0)
        if self._message is not joined:
            return
        process.channel.send(self._first.state())  # requests may be admitted from here on
        process.is_serving.set()
        process.has_served = True
        self._joined.set()
