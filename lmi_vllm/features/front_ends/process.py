"""A further front-end process: one more client of the engine, behind the same port.

The template forks it (`template.py`), or the first process starts it as `python -m`: with one end
of a socket pair. It ends when the socket closes, and the kernel ends it with its parent.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import uvloop

from lmi_vllm.assembly import assembled
from lmi_vllm.clock import CUT_OFF_ANSWER_SECONDS
from lmi_vllm.commands.serve import configure_server_logging, end_process
from lmi_vllm.config.listen import ListenAddress, listener_tls
from lmi_vllm.engine.vllm.forks import end_with_parent
from lmi_vllm.features.front_ends.channel import (
    AdapterList,
    CallReply,
    CancelRequests,
    Channel,
    ChannelClosedError,
    ConfirmState,
    EngineDied,
    FailureCounted,
    JoinEngine,
    LeaveEngine,
    LogLevel,
    ProcessReady,
    ProcessSetup,
    RunningRequests,
    StateChanged,
    StopProcess,
    TelemetryLine,
    VllmImported,
    WakeModel,
)
from lmi_vllm.features.front_ends.client_model import ClientModel
from lmi_vllm.features.front_ends.forwarding import Forwarder
from lmi_vllm.features.front_ends.shared_counters import CounterRow, SharedCounters
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents, error_statuses
from lmi_vllm.server.listeners import Listeners, web_options
from lmi_vllm.server.parts import Assembled
from lmi_vllm.server.ports import open_port
from lmi_vllm.signals import ENDING_SIGNALS
from lmi_vllm.telemetry.observers import Telemetry

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 0.5


async def open_shared_port(
    service: InferenceService,
    setup: ProcessSetup,
    address: ListenAddress,
    proxy: Forwarder,
    made: Assembled,
) -> Listeners:
    """Open the port that the first process listens on already, and which `proxy` leads to.

    Raises:
        StartupError: the address cannot be shared.
    """
    settings = setup.settings
    tls = (
        listener_tls(settings, setup.environ, made.configuration.make_tls)
        if address.is_tls
        else None
    )
    options = replace(web_options(settings, made.parts.routes), proxy=proxy)
    runner, _ = await open_port(address, service, options, tls, is_shared=True)
    return Listeners(address.url(), "", (runner,), address)


class FrontEndProcess:
    """Answers inference requests over an engine that another process started."""

    def __init__(self, channel: Channel, setup: ProcessSetup, made: Assembled) -> None:
        self._channel = channel
        self._setup = setup
        self._assembled = made
        self._row: CounterRow = SharedCounters(Path(setup.counters), setup.processes).row(setup.row)
        self._lifecycle = Lifecycle()
        self._lifecycle.on_failure.append(lambda cause: channel.send(FailureCounted(cause)))
        self._queue = RequestQueue(self._lifecycle, slots=self._row)
        self._service = InferenceService(
            self._queue,
            statuses=error_statuses(setup.settings),
            telemetry=Telemetry(send_line=self._send_line),
        )
        self._service.rest.on_wanted.append(lambda: channel.send(WakeModel()))
        self._events = ServerEvents(is_first=False)
        self._model = ClientModel(self._service, channel, made, setup.environ)
        self._join_message: JoinEngine | None = None
        self._listeners: Listeners | None = None
        self._forwarder: Forwarder | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()

    async def run(self) -> None:
        """Serve until the first process sends `StopProcess` or is gone."""
        setup = self._setup
        async with contextlib.AsyncExitStack() as features:
            for run in self._assembled.parts.lifespans:
                lifespan = run(self._service, setup.settings, setup.environ, self._events)
                await features.enter_async_context(lifespan)
            self._spawn(self._import())
            listening = asyncio.create_task(self._listen())
            failing = asyncio.create_task(self._failed.wait())
            await asyncio.wait({listening, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not self._failed.is_set():
                await listening
            await self._close()

    async def _listen(self) -> None:
        """Handle messages of the first process until `StopProcess`, or until it is gone."""
        with contextlib.suppress(ChannelClosedError):
            while not isinstance(message := await self._channel.receive(), StopProcess):
                self._follow(message)

    def _follow(self, message: object) -> None:
        match message:
            case JoinEngine():
                self._spawn(self._join(message))
            case LeaveEngine():
                self._spawn(self._detach(message))
            case AdapterList():
                self._spawn(self._route(message))
            case CallReply():
                self._channel.resolve(message)
            case _:
                self._apply(message)

    def _apply(self, message: object) -> None:
        match message:
            case StateChanged():
                self._queue.resize(message.limit)
                self._lifecycle.mirror(
                    message.state, has_model=message.has_model, is_resting=message.is_resting
                )
            case ConfirmState():
                self._channel.send(CallReply(message.number))
            case CancelRequests():
                self._queue.cancel_all()
            case EngineDied():
                self._model.engine_died()
            case LogLevel():
                for each in (logging.getLogger(), logging.getLogger("vllm")):
                    each.setLevel(message.level)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("this front-end process ends: %s", error, exc_info=error)
            self._failed.set()

    async def _import(self) -> None:
        await self._model.load(self._setup.arguments)
        self._channel.send(VllmImported())

    async def _join(self, message: JoinEngine) -> None:
        """Join the engine; the port opens with the first list of adapters."""
        is_first = self._join_message is None
        if not await self._model.join(message, is_first=is_first):
            self._channel.send(ProcessReady())  # for the next engine
            return
        self._queue.resize(message.limit)
        if is_first:
            self._spawn(self._report_engine())
        self._join_message = message
        self._channel.send(ProcessReady())

    async def _detach(self, message: LeaveEngine) -> None:
        await self._model.leave()
        self._channel.send(CallReply(message.number))

    async def _route(self, message: AdapterList) -> None:
        """Route by the list; the first list opens the port."""
        if self._join_message is None:
            raise RuntimeError("the engine has not been joined")
        await self._model.follow(message)
        if self._listeners is None:
            self._forwarder = Forwarder(self._join_message.first)
            self._listeners = await open_shared_port(
                self._service,
                self._setup,
                self._join_message.address,
                self._forwarder,
                self._assembled,
            )
        self._channel.send(CallReply(message.number))

    async def _report_engine(self) -> None:
        """Report liveness and this process's requests in the engine, twice a second."""
        reported: tuple[tuple[str, ...], int] = ((), 0)
        while True:
            figures = self._model.figures()
            self._row.report_engine(figures.running, figures.steps, figures.not_finite)
            self._row.add_ends(self._service.telemetry.totals.take())
            if figures.requests is not None:
                news = figures.requests, figures.begun  # they may all be over by now
                if news != reported:
                    self._channel.send(RunningRequests(figures.requests))
                reported = news
            await asyncio.sleep(REPORT_SECONDS)

    def _send_line(self, text: str) -> None:
        self._channel.send(TelemetryLine(text))

    async def _close(self) -> None:
        await self._queue.wait_own(CUT_OFF_ANSWER_SECONDS)
        await self._model.drained()
        if self._listeners is not None:
            await self._listeners.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        self._row.add_ends(self._service.telemetry.totals.take())
        await self._model.close()


async def serve(descriptor: int) -> None:
    """Run a front-end process over this end of the socket pair."""
    channel = await Channel.over(socket.socket(fileno=descriptor))
    setup = await channel.receive()
    if not isinstance(setup, ProcessSetup):
        raise RuntimeError("the first message is not ProcessSetup")
    configure_server_logging(setup.settings, setup.environ)
    await FrontEndProcess(channel, setup, assembled()).run()


def run_front_end(descriptor: int) -> NoReturn:
    """Be a front-end process over this end of the socket pair, to the end."""
    for number in ENDING_SIGNALS:  # the first process drains, then ends this one
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(descriptor))
        logging.shutdown()
        end_process(0)


def main() -> None:
    """Run as a child process; the arguments are the socket's descriptor and the parent's pid."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with_parent(parent)
    run_front_end(descriptor)


if __name__ == "__main__":
    main()
