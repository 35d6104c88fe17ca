"""A further front-end process: one more client of the engine, behind the same port.

Started by `front_ends.py` as `python -m`, with one end of a socket pair and the id of its parent;
it ends when that line closes, and the kernel ends it with its parent.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from lmi_vllm.commands.serve import configure_server_logging, leave
from lmi_vllm.engine.factory import settle, settle_again
from lmi_vllm.engine.vllm.factory import import_vllm
from lmi_vllm.engine.vllm.processes import end_with_parent, new_engine_thread
from lmi_vllm.extras.front_ends.channel import (
    AdapterList,
    Began,
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
    Running,
    StateIs,
    Stop,
    TelemetryLine,
)
from lmi_vllm.extras.front_ends.followed_adapters import FollowedAdapters
from lmi_vllm.extras.front_ends.forwarding import Forwarder
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.error_rates import ReportedErrors
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.places import Board, Row
from lmi_vllm.inference.pooling import GENERATE
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.listeners import Listeners, open_front_end
from lmi_vllm.server.liveness import warm_up
from lmi_vllm.server.service_start import error_statuses, sessions_of
from lmi_vllm.server.telemetry_start import Traces, log_request_metrics, running_telemetry
from lmi_vllm.telemetry.records import RequestSummary
from lmi_vllm.telemetry.sagemaker_lines import VARIABLE as TELEMETRY_VARIABLE
from lmi_vllm.telemetry.sagemaker_lines import failure_line

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.seat import SeatedEngine

logger = logging.getLogger(__name__)

TELL_SECONDS: Final = 0.5
LAST_WORD_SECONDS: Final = 2.0


class FrontEndProcess:
    """Answers inference requests over an engine that another process started."""

    def __init__(self, channel: Channel, hello: Hello) -> None:
        self._channel = channel
        self._hello = hello
        self._row: Row = Board(Path(hello.board), hello.processes).row(hello.row)
        errors = ReportedErrors(lambda kind: channel.send(Counted(kind)))
        self._lifecycle = Lifecycle(error_rates=errors)
        self._queue = RequestQueue(self._lifecycle, places=self._row)
        self._service = InferenceService(self._queue, statuses=error_statuses(hello.settings))
        self._traces = Traces(self._service, hello.environ)
        self._thread: ThreadPoolExecutor | None = new_engine_thread()
        self._engine_turn = asyncio.Lock()
        self._list_turn = asyncio.Lock()
        self._engine: SeatedEngine | None = None
        self._adapters: FollowedAdapters | None = None
        self._begin: Begin | None = None
        self._listeners: Listeners | None = None
        self._forwarder: Forwarder | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()

    async def run(self) -> None:
        """Serve until the first process says that it is over, or is gone."""
        hello = self._hello
        observers = self._service.telemetry.observers
        if hello.environ.get(TELEMETRY_VARIABLE):
            observers.append(self._tell_failure)
        environ = {
            name: value for name, value in hello.environ.items() if name != TELEMETRY_VARIABLE
        }
        async with running_telemetry(self._service, hello.settings, environ):
            self._spawn(self._import())
            listening = asyncio.create_task(self._listen())
            failing = asyncio.create_task(self._failed.wait())
            await asyncio.wait({listening, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not self._failed.is_set():
                await listening
            await self._close()

    async def _listen(self) -> None:
        """Follow the first process."""
        with contextlib.suppress(ChannelClosedError):
            while not isinstance(message := await self._channel.receive(), Stop):
                self._follow(message)

    def _follow(self, message: object) -> None:
        match message:
            case Begin():
                self._spawn(self._join(message))
            case Detach():
                self._spawn(self._detach(message))
            case AdapterList():
                self._spawn(self._route(message))
            case Done():
                self._channel.answered(message)
            case _:
                self._be_told(message)

    def _be_told(self, message: object) -> None:
        match message:
            case StateIs():
                self._queue.resize(message.limit)
                self._lifecycle.follow(message.state, has_model=message.has_model)
            case EndAll():
                self._queue.end_all()
            case EngineGone() if self._engine is not None:
                self._engine.engine_died()
            case LogLevel():
                for each in (logging.getLogger(), logging.getLogger("vllm")):
                    each.setLevel(message.level)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("this front-end process ends: %s", error, exc_info=error)
            self._failed.set()

    async def _import(self) -> None:
        load = partial(import_vllm, self._hello.arguments)
        await asyncio.get_running_loop().run_in_executor(self._thread, load)
        self._channel.send(Imported())

    async def _join(self, begin: Begin) -> None:
        async with self._engine_turn:
            await self._join_engine(begin)

    async def _detach(self, message: Detach) -> None:
        async with self._engine_turn:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()
                self._service.detach()
        self._channel.send(Done(message.number))

    async def _join_engine(self, begin: Begin) -> None:
        """Join the engine and prove it; requests come in when the adapters are known."""
        from lmi_vllm.engine.vllm.seat import join_vllm_engine  # vLLM has been imported by now

        self._thread = self._thread or new_engine_thread()
        self._engine = engine = await join_vllm_engine(
            begin.arguments, begin.profile, self._thread, begin.seat, self
        )
        self._thread = None  # the engine's own from here on
        engine.report_requests(lambda request: self._channel.send(Began(request)))
        if engine.task == GENERATE:
            await warm_up(engine, has_logprobs=False)
        service, settings, profile = self._service, begin.settings, begin.profile
        service.expect(begin.model, profile, sessions_of(settings))
        self._lifecycle.expect_model(begin.model_name)
        self._queue.resize(begin.limit)
        log_request_metrics(service, settings)
        self._traces.prepare(begin.arguments)
        self._traces.begin()
        self._adapters = FollowedAdapters(
            engine,
            self._ask_to_load,
            is_enabled=profile.enable_lora,
            reserved_names=profile.served_names,
        )
        service.attach(Runtime(engine, profile, self._adapters))
        if self._begin is None:
            self._spawn(self._tell_engine())
            settle()
        else:
            settle_again()
        self._begin = begin
        self._channel.send(Ready())

    async def _route(self, message: AdapterList) -> None:
        """Route by the list; the first one opens the port."""
        if self._adapters is None or self._begin is None or self._engine is None:
            raise RuntimeError("the engine has not been joined")
        adapters = self._adapters
        async with self._list_turn:  # an older list must not overwrite a newer one
            self._engine.share(message.shared)
            gone = await adapters.follow(message.adapters)
        await adapters.let_go(gone, message.timeout_seconds)
        if self._listeners is None:
            begin, hello = self._begin, self._hello
            self._forwarder = Forwarder(begin.first)
            self._listeners = await open_front_end(
                self._service, hello.settings, hello.environ, begin.address, self._forwarder
            )
        self._channel.send(Done(message.number))

    @contextlib.asynccontextmanager
    async def hold(self, adapter: int) -> AsyncIterator[None]:
        """Keep an adapter usable; see `SharedState`."""
        number = self._channel.new_number()
        try:
            await self._channel.ask(Hold(number, adapter))
            yield
        finally:
            self._channel.send(Release(number))

    async def _ask_to_load(self, name: str) -> None:
        await self._channel.ask(LoadAdapter(self._channel.new_number(), name))

    async def _tell_engine(self) -> None:
        """Give a sign of life, and say what this process has in the engine."""
        told: tuple[str, ...] = ()
        while True:
            if (engine := self._engine) is not None:
                self._row.tell_engine(engine.running_requests, engine.progress)
                if (now := engine.engine_requests) != told:
                    told = now
                    self._channel.send(Running(now))
            else:
                self._row.tell_engine(0, 0)
            await asyncio.sleep(TELL_SECONDS)

    def _tell_failure(self, summary: RequestSummary) -> None:
        if (text := failure_line(summary)) is not None:
            self._channel.send(TelemetryLine(text))

    async def _close(self) -> None:
        await self._queue.wait_own(LAST_WORD_SECONDS)
        await self._traces.close()
        if self._listeners is not None:
            await self._listeners.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        if self._engine is not None:
            await self._engine.close()


async def serve(descriptor: int) -> None:
    """Serve over this end of the line."""
    channel = await Channel.over(socket.socket(fileno=descriptor))
    hello = await channel.receive()
    if not isinstance(hello, Hello):
        raise RuntimeError("the first message is no Hello")
    configure_server_logging(hello.settings, hello.environ)
    await FrontEndProcess(channel, hello).run()


def main() -> None:
    """Be such a process."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(descriptor))
        logging.shutdown()
        leave(0)


if __name__ == "__main__":
    main()
