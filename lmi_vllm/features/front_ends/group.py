"""The other front-end processes of a server (LMI_FRONTEND_PROCESSES), seen from the first one.

The first process is a complete server: it starts the engine, owns the adapters, and answers health,
metrics and every other route that is not inference. The others are further clients of the same
engine behind the same port (SO_REUSEPORT): they answer inference and forward the rest to the first.
Shared state is kept here: the list of adapters, which of them are in the engine together, and, in
the shared counters, how many requests are in flight.
"""

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Final, cast

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine, EngineClient, start_error
from lmi_vllm.features.front_ends.channel import (
    CancelRequests,
    EngineDied,
    JoinEngine,
    LogLevel,
    ProcessSetup,
)
from lmi_vllm.features.front_ends.first import EngineClients, FirstProcess, SharedEngine
from lmi_vllm.features.front_ends.handle import FrontEnd
from lmi_vllm.features.front_ends.hanging import end_hanging
from lmi_vllm.features.front_ends.joining import Joining
from lmi_vllm.features.front_ends.series import remove_files, series_of_all
from lmi_vllm.features.front_ends.starts import FrontEndStarts
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.messages import EngineArguments, ServingProfile
from lmi_vllm.private_folders import new_private_folder
from lmi_vllm.server.context import ProcessGroup

logger = logging.getLogger(__name__)

SPARE_CLIENTS: Final = 3  # processes that may be replaced during the life of one engine
STEP: Final = "front ends"  # of a start, which waits for them


class FrontEndGroup(ProcessGroup):
    """The processes beside the first one, and what all of them share."""

    def __init__(self, count: int, service: InferenceService, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._count = count
        self._address = ListenAddress("http")  # where all processes answer
        self._service = service
        self._environ = environ
        self._first = FirstProcess(service)
        self._folder = new_private_folder("lmi-vllm-fronts-")  # mode 0700
        self.first_socket = str(self._folder.path / "first.sock")
        self._clients = EngineClients(self._folder.path, count + SPARE_CLIENTS)
        self._starts = FrontEndStarts()
        self._processes: list[FrontEnd] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._settings: Settings | None = None
        self._setup: ProcessSetup | None = None
        self._joining = Joining(
            self._processes, count, self._first, self._clients, self._begin_task
        )
        self._ending = "no process could be started"  # of the one that ended last
        service.telemetry.series = series_of_all
        service.queue.share(self._clients.counters.row(0))
        service.queue.on_end.append(lambda: self._broadcast(CancelRequests()))
        service.lifecycle.on_state.append(self._tell_state)
        service.telemetry.on_level.append(lambda level: self._broadcast(LogLevel(level)))

    def opened(self, address: ListenAddress) -> None:
        """Set the address where all processes are to answer."""
        self._address = address

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run, before the engine's."""
        self._starts.begin()
        clients = self._clients
        self._settings = settings
        self._setup = self._setup or ProcessSetup(
            settings, self._environ, arguments, str(clients.counters_path), clients.rows, 0
        )
        clients.begin(process.row for process in self._processes)
        self.failed.clear()  # the next engine has spare clients again
        self._start_missing()
        if self._watching is None:
            watch = end_hanging(self._processes, clients.counters)
            self._watching = asyncio.create_task(watch)

    def new_clients(self) -> tuple[EngineClient, ...]:
        """Return the clients of the engine that is started next."""
        return self._clients.new()

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Let the processes join the engine; returns once all of them answer requests.

        Raises:
            EngineStartError: more of them ended than can be replaced, or the engine has died.
        """
        if self._settings is None:
            raise RuntimeError("begin() must be called first")
        # Settings that give a model to another engine than vLLM are refused with these processes.
        shared = cast(SharedEngine, engine)
        self._first.use(shared, adapters)
        self._start_missing()
        progress = self._service.lifecycle.start
        progress.enter(Phase.ENGINE)  # again: they may still import vLLM
        progress.enter_step(STEP, {})
        self._joining.begin(
            JoinEngine(
                settings=self._settings,
                client=shared.complete(self._clients.of(1)),
                arguments=shared.arguments,
                profile=replace(profile, task=engine.task),
                model_url=self._service.model_url,
                model_name=self._service.lifecycle.model_name,
                address=self._address,
                first=self.first_socket,
                limit=self._service.queue.limit,
            )
        )
        await self._complete(engine)
        self._joining.log_count()

    async def _complete(self, engine: Engine) -> None:
        """Return once all processes serve.

        Raises:
            EngineStartError: see `join`.
        """
        serving = asyncio.create_task(self._joining.join_all())
        failing = asyncio.create_task(self.failed.wait())
        # Of a dead engine a process would wait for the answer for ever.
        dying = asyncio.create_task(engine.wait_until_dead())
        ends = (serving, failing, dying)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise start_error(f"the engine did not start: {dying.result()}")
            if not serving.done():
                raise start_error(f"a front-end process did not start: {self._ending}")
            serving.result()
        finally:
            for end in ends:
                end.cancel()

    def engine_died(self) -> None:
        """Have each process end its requests in the engine; none joins it any more."""
        self._joining.end()
        self._broadcast(EngineDied())

    async def confirm_state(self) -> None:
        """Return once every process follows the server's state."""
        await asyncio.gather(*(process.confirm_state() for process in self._processes))

    async def detach(self) -> None:
        """Have the processes leave the engine; they keep the port and forward every request."""
        self._joining.end()
        self._first.leave()
        self._clients.begin(process.row for process in self._processes)
        await asyncio.gather(*(process.detach() for process in self._processes))

    async def end(self) -> None:
        """Stop the processes; returns when all have ended."""
        self._joining.end()
        self._first.leave()
        if self._watching is not None:
            self._watching.cancel()
        ending = [*self._processes]
        self._processes.clear()
        self._starts.close()  # one that is forked now would wait for a template that hangs
        await asyncio.gather(*(process.stop() for process in ending))
        self._service.telemetry.totals.add(*self._clients.counters.row(0).ends)

    def remove(self) -> None:
        """Remove the private folder and the shared metric files."""
        self._starts.close()
        self._folder.remove()
        remove_files()

    def _start_missing(self) -> list[FrontEnd]:
        """Start as many processes as there should be, and return them."""
        started: list[FrontEnd] = []
        while len(self._processes) + len(started) < self._count - 1:
            if self._clients.is_exhausted:
                if not self.failed.is_set():
                    logger.error("no further front-end process begins before the next engine does")
                self.failed.set()
                break
            started.append(FrontEnd(self._first, self._clients.take(), self._starts.start))
        self._processes += started
        for process in started:
            self._begin_task(self._run(process))
        return started

    def _begin_task(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ran)
        return task

    def _ran(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a front-end process could not be run", exc_info=error)
            self.failed.set()

    async def _run(self, process: FrontEnd) -> None:
        """Supervise one process: run it until it ends, then replace it."""
        if self._setup is None:
            raise RuntimeError("begin() must be called first")
        await process.run(replace(self._setup, row=process.row))
        self._clients.counters.row(process.row).clear()
        if process not in self._processes:
            return  # it was stopped on purpose
        logger.error("front-end process %d ended with %s", process.pid, process.ending)
        self._ending = process.ending
        self._processes.remove(process)
        if self._first.state().state is State.DRAINING:
            return  # it is over before another could serve
        await asyncio.gather(*map(self._joining.join_late, self._start_missing()))

    async def publish(self, adapters: Collection[Adapter], timeout_seconds: float) -> None:
        """Send every process this list to route by; one that does not reply is killed."""
        if (engine := self._first.engine) is None:
            return
        shared = engine.shared_adapters
        await asyncio.gather(
            *(
                process.send_adapters(adapters, shared, timeout_seconds)
                for process in self._processes
                if process.is_routed
            )
        )

    def _tell_state(self, state: State) -> None:
        """Tell all processes; one that joins the engine still is told of a ready model then."""
        for process in self._processes:
            if state is not State.HEALTHY or process.is_serving.is_set():
                process.send(self._first.state())

    def _broadcast(self, message: object) -> None:
        for process in self._processes:
            process.send(message)


def front_end_group(
    service: InferenceService, settings: Settings, environ: Mapping[str, str]
) -> FrontEndGroup | None:
    """Return the group of LMI_FRONTEND_PROCESSES processes; None where it is one."""
    count = settings.server.lmi_frontend_processes
    return FrontEndGroup(count, service, environ) if count > 1 else None
