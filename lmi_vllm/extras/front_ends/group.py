"""The other front-end processes of a server (LMI_FRONTEND_PROCESSES), seen from the first one.

The first process is a whole server: it starts the engine, owns the adapters, answers for health,
metrics and everything else there is one of. The others are further clients of the same engine
behind the same port (SO_REUSEPORT): they answer inference, and hand the rest to the first. What has
to be decided once is decided here: which adapters there are, which of them may be in the engine
together, and, on the board, how many requests are in flight.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine, OtherClients
from lmi_vllm.engine.private_folders import new_private_folder
from lmi_vllm.errors import EngineDeadError, EngineStartError
from lmi_vllm.extras.front_ends.channel import (
    Begin,
    Counted,
    EndAll,
    EngineGone,
    Hello,
    LogLevel,
    StateIs,
    TelemetryLine,
)
from lmi_vllm.extras.front_ends.handle import EndedError, FrontEnd
from lmi_vllm.inference.places import Board
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, EngineSeat, ServingProfile
from lmi_vllm.telemetry.registry import remove_files

logger = logging.getLogger(__name__)

SPARE_SEATS: Final = 3  # processes that may be replaced during the life of one engine
SILENT_SECONDS: Final = 15.0  # a process tells every half second; one that hangs is ended
LOOK_SECONDS: Final = 1.0


class SharedEngine(Engine, Protocol):
    """An engine that has seats for other processes."""

    others: OtherClients

    @property
    def arguments(self) -> EngineArguments:
        """What it was started with."""
        ...

    @property
    def shared_adapters(self) -> Any:
        """The adapters in it."""
        ...

    def hold_for_another(self, engine_id: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Keep an adapter usable for another client."""
        ...

    async def abort_for_another(self, engine_requests: Collection[str]) -> None:
        """End requests of another client, by their ids in the engine."""
        ...

    def complete(self, seat: EngineSeat) -> EngineSeat:
        """Return a seat that can be taken."""
        ...


class SeveralFrontEnds:
    """The processes beside the first one, and what all of them share."""

    def __init__(self, count: int, service: InferenceService, environ: Mapping[str, str]) -> None:
        self.failed = asyncio.Event()  # more ended than one engine has seats for
        self.count = count
        self._address = ListenAddress("http")  # where all of them answer
        self._service = service
        self._environ = environ
        self._private = new_private_folder("lmi-vllm-fronts-")  # for us alone: 0700
        self._folder = self._private.path
        self.first_socket = str(self._folder / "first.sock")
        self._rows = count + SPARE_SEATS
        self._board_path = self._folder / "board"
        self._board = Board(self._board_path, self._rows)
        self._processes: list[FrontEnd] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats: list[EngineSeat] = []
        self._engines = 0
        self._used: set[int] = set()  # rows whose seats at the engine are, or were, taken
        self._watching: asyncio.Task[None] | None = None
        self._settings: Settings | None = None
        self._hello: Hello | None = None
        self._begin: Begin | None = None
        self.engine: SharedEngine | None = None
        self.adapters: AdapterRegistry | None = None
        service.queue.share(self._board.row(0))
        service.queue.watch_end(lambda: self._tell(EndAll()))
        service.lifecycle.watch(lambda _: self._tell(self._state()))
        service.telemetry.on_level.append(lambda level: self._tell(LogLevel(level)))

    def opened(self, address: ListenAddress) -> None:
        """Take the address where all of them are to answer."""
        self._address = address

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run: they load what they need while the engine starts."""
        self._settings = settings
        self._hello = self._hello or Hello(
            settings, self._environ, arguments, str(self._board_path), self._rows, 0
        )
        self._used = {process.row for process in self._processes}
        self.failed.clear()  # the next engine has spare seats again
        self._start_missing()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def new_seats(self) -> tuple[EngineSeat, ...]:
        """Return the seats to reserve at the engine that is started next."""
        self._engines += 1
        folder = self._folder / f"engine-{self._engines}"
        folder.mkdir()
        self._seats = [
            EngineSeat(index, self._rows, f"ipc://{folder}/in{index}", f"ipc://{folder}/out{index}")
            for index in range(1, self._rows)
        ]
        return tuple(self._seats)

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Let the processes join the engine; returns once all of them answer requests.

        Raises:
            EngineStartError: one of them could not.
        """
        shared: Any = engine
        self.engine, self.adapters = shared, adapters
        shared.others = self._board.row(0)
        adapters.publish = self._publish
        if self._settings is None:
            raise RuntimeError("begin comes first")
        self._start_missing()
        self._begin = Begin(
            settings=self._settings,
            seat=shared.complete(self._seats[0]),
            arguments=shared.arguments,
            profile=replace(profile, task=engine.task),
            model=self._service.model,
            model_name=self._service.lifecycle.model_name,
            address=self._address,
            first=self.first_socket,
            limit=self._service.queue.limit,
        )
        try:
            await asyncio.gather(*(self._join(process) for process in self._processes))
        except EndedError as error:
            raise EngineStartError(f"a front-end process did not start: {error}") from error
        logger.info("%d front-end processes answer at %s", self.count, self._address.url())

    def engine_died(self) -> None:
        """Tell them."""
        self._tell(EngineGone())

    async def detach(self) -> None:
        """Have the processes leave the engine; they answer on, with what the first process says."""
        self._begin = self.engine = None
        await asyncio.gather(*(process.detach() for process in self._processes))

    async def end(self) -> None:
        """End the processes."""
        self._begin = self.engine = None
        if self._watching is not None:
            self._watching.cancel()
        ending, self._processes = self._processes, []
        await asyncio.gather(*(process.stop() for process in ending))

    def remove(self) -> None:
        """Remove what was made for them."""
        self._private.remove()
        remove_files()

    def _start_missing(self) -> None:
        while len(self._processes) < self.count - 1:
            self._processes.append(self._start(self._free_row()))

    def _free_row(self) -> int:
        """Take the first row whose seat at the engine nobody has had."""
        row = min(set(range(1, self._rows)) - self._used)
        self._used.add(row)
        return row

    def _start(self, row: int) -> FrontEnd:
        process = FrontEnd(self, row)
        task = asyncio.create_task(self._run(process))
        self._tasks.add(task)
        task.add_done_callback(self._ran)
        return process

    def _ran(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a front-end process could not be run", exc_info=error)
            self.failed.set()

    async def _run(self, process: FrontEnd) -> None:
        """Live with a process until it ends, then put another in its place."""
        if self._hello is None:
            raise RuntimeError("begin comes first")
        await process.run(replace(self._hello, row=process.row))
        self._board.row(process.row).clear()
        if process not in self._processes:
            return  # it was to end
        logger.error("front-end process %d ended with %s", process.pid, process.ending)
        self._processes.remove(process)
        if self._begin is None:
            return  # `begin` or `join` starts another
        if len(self._used) == self._rows - 1:
            logger.error("it was the last that could be replaced")
            self.failed.set()
            return
        another = self._start(self._free_row())
        self._processes.append(another)
        with contextlib.suppress(EndedError):  # said where it ends, and replaced again
            await self._join(another)

    async def _join(self, process: FrontEnd) -> None:
        await process.wait_for(process.imported)
        begin = self._begin
        if begin is None or self.engine is None or self.adapters is None:
            return
        seat = self.engine.complete(self._seats[process.row - 1])
        process.channel.send(replace(begin, seat=seat))
        await process.wait_for(process.joined)
        process.is_routed = True
        process.channel.send(self._state())
        await process.tell_adapters(tuple(self.adapters), self.engine.shared_adapters, 0.0)
        process.is_serving.set()

    async def _publish(self, adapters: Collection[Adapter], timeout_seconds: float) -> None:
        """Have every process route by this list; one that does not answer is ended."""
        if self.engine is None:
            return
        shared = self.engine.shared_adapters
        await asyncio.gather(
            *(
                process.tell_adapters(adapters, shared, timeout_seconds)
                for process in self._processes
                if process.is_routed
            )
        )

    def _state(self) -> StateIs:
        lifecycle, queue = self._service.lifecycle, self._service.queue
        return StateIs(lifecycle.state, queue.limit, lifecycle.has_model)

    def _tell(self, message: object) -> None:
        for process in self._processes:
            process.tell(message)

    @contextlib.asynccontextmanager
    async def hold(self, engine_id: int) -> AsyncIterator[None]:
        """Keep an adapter usable for a request of another process.

        Raises:
            LmiError: it cannot be used.
        """
        if self.engine is None:
            raise EngineDeadError
        async with self.engine.hold_for_another(engine_id):
            yield

    async def load(self, name: str) -> None:
        """Load an adapter that a request of another process names.

        Raises:
            LmiError: see `AdapterRegistry.load_on_first_use`.
        """
        if self.adapters is None:
            raise EngineDeadError
        await self.adapters.load_on_first_use(name)

    async def abort(self, engine_requests: Collection[str]) -> None:
        """End requests in the engine whose process is gone."""
        if self.engine is not None and engine_requests:
            logger.warning("%d requests of a process that ended are aborted", len(engine_requests))
            await self.engine.abort_for_another(engine_requests)

    async def _watch(self) -> None:
        """End processes that hang: the kernel goes on giving them connections."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for process in self._processes:
                silent = self._board.row(process.row).silent_seconds
                if process.is_serving.is_set() and silent > SILENT_SECONDS:
                    logger.error("front-end process %d hangs: it is ended", process.pid)
                    process.kill()

    def note(self, message: Counted | TelemetryLine) -> None:
        """Take note of what has happened to a request of another process."""
        if isinstance(message, Counted):
            self._service.lifecycle.error_rates.count(message.kind)
            return
        for tell in self._service.telemetry.on_line:
            tell(message.text)


def several(
    service: InferenceService, settings: Settings, environ: Mapping[str, str]
) -> SeveralFrontEnds | None:
    """Return the processes that LMI_FRONTEND_PROCESSES asks for; None where it is one."""
    count = settings.server.lmi_frontend_processes
    return SeveralFrontEnds(count, service, environ) if count > 1 else None
