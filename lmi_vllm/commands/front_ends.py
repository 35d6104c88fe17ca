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
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from lmi_vllm.commands.front_end_channel import (
    AdapterList,
    Begin,
    Channel,
    ChannelClosedError,
    Counted,
    Detach,
    Done,
    EndAll,
    EngineGone,
    Hello,
    Hold,
    Imported,
    LoadAdapter,
    LogLevel,
    Ready,
    Release,
    StateIs,
    Stop,
    TelemetryLine,
)
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import EngineStartError, LmiError
from lmi_vllm.inference.adapter_entry import Adapter
from lmi_vllm.inference.adapters import AdapterRegistry
from lmi_vllm.inference.followed_adapters import without_hooks
from lmi_vllm.inference.places import Board
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, EngineSeat, ServingProfile
from lmi_vllm.startup.listen import ListenAddress
from lmi_vllm.startup.settings import Settings
from lmi_vllm.telemetry.registry import OTHER_PROCESSES, forget_process, remove_files

logger = logging.getLogger(__name__)

SPARE_SEATS: Final = 3  # processes that may be replaced during the life of one engine
STOP_SECONDS: Final = 3.0
DETACH_SECONDS: Final = 8.0  # a client of a dead engine tells its requests first
ADAPTER_GRACE_SECONDS: Final = 5.0  # beyond the time that its requests get


class FrontEnds:
    """No other process: what a server of one does about the others."""

    count = 1
    first_socket = ""

    def __init__(self) -> None:
        self.failed = asyncio.Event()  # they end faster than they can be replaced
        self.address = ListenAddress("http")  # where all of them answer

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run: they load what they need while the engine starts."""

    def new_seats(self) -> tuple[EngineSeat, ...]:
        """Return the seats to reserve at the engine that is started next."""
        return ()

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Let the processes join the engine; returns once all of them answer requests.

        Raises:
            EngineStartError: one of them could not.
        """

    def engine_died(self) -> None:
        """Tell them."""

    async def detach(self) -> None:
        """Have the processes leave the engine; they answer on, with what the first process says."""

    async def end(self) -> None:
        """End the processes."""

    def remove(self) -> None:
        """Remove what was made for them."""


class SharedEngine(Engine, Protocol):
    """An engine that has seats for other processes."""

    others: Any

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

    def complete(self, seat: EngineSeat) -> EngineSeat:
        """Return a seat that can be taken."""
        ...


class SeveralFrontEnds(FrontEnds):
    """The processes beside the first one, and what all of them share."""

    def __init__(self, count: int, service: InferenceService, environ: Mapping[str, str]) -> None:
        super().__init__()
        self.count = count
        self._service = service
        self._environ = environ
        self._folder = Path(tempfile.mkdtemp(prefix="lmi-vllm-fronts-"))  # for us alone: 0700
        self.first_socket = str(self._folder / "first.sock")
        self._rows = count + SPARE_SEATS
        self._board_path = self._folder / "board"
        self._board = Board(self._board_path, self._rows)
        self._processes: list[_FrontEnd] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._seats: list[EngineSeat] = []
        self._engines = 0
        self._used: set[int] = set()  # rows whose seats at the engine are, or were, taken
        self._settings: Settings | None = None
        self._hello: Hello | None = None
        self._begin: Begin | None = None
        self.engine: SharedEngine | None = None
        self.adapters: AdapterRegistry | None = None
        admission = service.admission
        admission.places = self._board.row(0)
        admission.on_state.append(lambda state: self._tell(StateIs(state, admission.limit)))
        admission.on_end.append(lambda: self._tell(EndAll()))
        service.telemetry.on_level.append(lambda level: self._tell(LogLevel(level)))

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run: they load what they need while the engine starts."""
        self._settings = settings
        self._hello = self._hello or Hello(
            settings, self._environ, arguments, str(self._board_path), self._rows, 0
        )
        self._used = {process.row for process in self._processes}
        self._start_missing()

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
        admission = self._service.admission
        if self._settings is None:
            raise RuntimeError("begin comes first")
        self._start_missing()
        self._begin = Begin(
            settings=self._settings,
            seat=shared.complete(self._seats[0]),
            arguments=shared.arguments,
            profile=replace(profile, task=engine.task),
            model=self._service.model,
            model_name=admission.model_name,
            address=self.address,
            first=self.first_socket,
            limit=admission.limit,
        )
        try:
            await asyncio.gather(*(self._join(process) for process in self._processes))
        except _EndedError as error:
            raise EngineStartError(f"a front-end process did not start: {error}") from error
        logger.info("%d front-end processes answer at %s", self.count, self.address.url())

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
        ending, self._processes = self._processes, []
        await asyncio.gather(*(process.stop() for process in ending))

    def remove(self) -> None:
        """Remove what was made for them."""
        shutil.rmtree(self._folder, ignore_errors=True)
        remove_files()

    def _start_missing(self) -> None:
        while len(self._processes) < self.count - 1:
            self._processes.append(self._start(self._free_row()))

    def _free_row(self) -> int:
        """Take the first row whose seat at the engine nobody has had."""
        row = min(set(range(1, self._rows)) - self._used)
        self._used.add(row)
        return row

    def _start(self, row: int) -> "_FrontEnd":
        process = _FrontEnd(self, row)
        task = asyncio.create_task(self._run(process))
        self._tasks.add(task)
        task.add_done_callback(self._ran)
        return process

    def _ran(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a front-end process could not be run", exc_info=error)
            self.failed.set()

    async def _run(self, process: "_FrontEnd") -> None:
        """Live with a process until it ends, then put another in its place."""
        if self._hello is None:
            raise RuntimeError("begin comes first")
        await process.run(replace(self._hello, row=process.row))
        self._board.row(process.row).clear()
        if process not in self._processes:
            return  # it was to end
        self._processes.remove(process)
        if self._begin is None:
            return  # `begin` or `join` starts another
        logger.error("front-end process %d ended with %s", process.pid, process.ending)
        if len(self._used) == self._rows - 1:
            logger.error("it was the last that could be replaced")
            self.failed.set()
            return
        another = self._start(self._free_row())
        self._processes.append(another)
        with contextlib.suppress(_EndedError):  # said where it ends, and replaced again
            await self._join(another)

    async def _join(self, process: "_FrontEnd") -> None:
        await process.wait_for(process.imported)
        begin = self._begin
        if begin is None or self.engine is None or self.adapters is None:
            return
        seat = self.engine.complete(self._seats[process.row - 1])
        process.channel.send(replace(begin, seat=seat))
        await process.wait_for(process.joined)
        process.is_routed = True
        admission = self._service.admission
        process.channel.send(StateIs(admission.state, admission.limit))
        await process.tell_adapters(tuple(self.adapters), self.engine.shared_adapters, 0.0)
        process.is_serving.set()
        await process.wait_for(process.is_serving)

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

    def _tell(self, message: object) -> None:
        for process in self._processes:
            process.tell(message)

    def note(self, message: Counted | TelemetryLine) -> None:
        """Take note of what has happened to a request of another process."""
        if isinstance(message, Counted):
            self._service.admission.error_rates.count(message.kind)
            return
        for tell in self._service.telemetry.on_line:
            tell(message.text)


class _EndedError(Exception):
    """The process ended before it had come so far."""


@dataclass(slots=True)
class _FrontEnd:
    """One of the other processes."""

    company: SeveralFrontEnds
    row: int
    imported: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    is_serving: asyncio.Event = field(default_factory=asyncio.Event)
    is_routed: bool = False  # it hears of each change of the adapters
    ending: str = ""
    pid: int = 0
    _line: Channel | None = None
    _process: asyncio.subprocess.Process | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _holds: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def channel(self) -> Channel:
        """The line to the process."""
        if self._line is None:
            raise RuntimeError("the process has not been started")
        return self._line

    async def run(self, hello: Hello) -> None:
        """Start the process and serve its questions until it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "lmi_vllm.commands.front_end_process",
                str(theirs.fileno()), str(os.getpid()),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the first process: it drains
            )  # fmt: skip
        self.pid = self._process.pid
        OTHER_PROCESSES.add(self.pid)
        self._line = await Channel.over(ours)
        try:
            self._line.send(hello)
            while True:
                self._answer(await self._line.receive())
        except ChannelClosedError:
            self._line.close()
        finally:
            for hold in self._holds.values():
                hold.cancel()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # a half of it is of no use
            code = await self._process.wait()
            self.ending = f"signal {-code}" if code < 0 else f"code {code}"
            forget_process(self.pid)
            self._ended.set()

    async def wait_for(self, event: asyncio.Event) -> None:
        """Return when the process has come so far.

        Raises:
            _EndedError: it ended.
        """
        waits = [asyncio.create_task(one.wait()) for one in (event, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not event.is_set():
            raise _EndedError(self.ending)

    def tell(self, message: object) -> None:
        """Send a message, if there is somebody to hear it."""
        if self._line is not None:
            self._line.send(message)

    async def tell_adapters(
        self, adapters: Collection[Adapter], shared: Any, timeout_seconds: float
    ) -> None:
        """Have the process route by this list; ended if it does not say in time that it does."""
        message = AdapterList(
            self.channel.new_number(),
            tuple(without_hooks(adapter) for adapter in adapters),
            tuple(shared),
            timeout_seconds,
        )
        try:
            async with asyncio.timeout(timeout_seconds + ADAPTER_GRACE_SECONDS):
                await self.channel.ask(message)
        except TimeoutError:
            logger.error("front-end process %d does not answer: it is ended", self.pid)
            self._kill()
        except LmiError as error:
            logger.debug("front-end process %d: %s", self.pid, error.text)  # it has ended

    async def detach(self) -> None:
        """Have the process leave its engine; ended if it does not in time."""
        self.is_routed = False
        self.joined.clear()
        self.is_serving.clear()
        if self._line is None or not self.imported.is_set():
            return  # it has not come so far
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                await self._line.ask(Detach(self._line.new_number()))
        except TimeoutError:
            self._kill()
        except LmiError as error:
            logger.debug("front-end process %d: %s", self.pid, error.text)  # it has ended

    async def stop(self) -> None:
        """End the process."""
        self.tell(Stop())
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
        except TimeoutError:
            self._kill()
            await self._ended.wait()

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _answer(self, message: object) -> None:
        match message:
            case Imported():
                self.imported.set()
            case Ready():
                self.joined.set()
            case Done():
                self.channel.answered(message)
            case Counted() | TelemetryLine():
                self.company.note(message)
            case _:
                self._serve(message)

    def _serve(self, message: object) -> None:
        match message:
            case Hold():
                self._begin(message.number, self._hold(message))
            case LoadAdapter():
                self._begin(message.number, self._load(message))
            case Release() if message.number in self._holds:
                self._holds[message.number].cancel()

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._holds[number] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._holds.pop(number, None))

    async def _hold(self, message: Hold) -> None:
        """Hold an adapter until the process releases it, or ends: then this task is cancelled."""
        engine = self.company.engine
        if engine is None:
            return
        try:
            async with engine.hold_for_another(message.engine_id):
                self.channel.send(Done(message.number))
                await asyncio.Event().wait()
        except LmiError as error:
            self.channel.send(Done(message.number, error))

    async def _load(self, message: LoadAdapter) -> None:
        adapters = self.company.adapters
        error: LmiError | None = None
        try:
            if adapters is not None:
                await adapters.ensure_loaded(message.name)
        except LmiError as raised:
            error = raised
        self.channel.send(Done(message.number, error))
