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
from pathlib import Path
from typing import Any, Final

import uvloop

from lmi_vllm.clock import CUT_OFF_ANSWER_SECONDS
from lmi_vllm.commands.serve import configure_server_logging, end_process
from lmi_vllm.engine.vllm.processes import end_with_parent
from lmi_vllm.extras.front_ends.channel import (
    AdapterList,
    Begin,
    CancelRequests,
    Channel,
    ChannelClosedError,
    Detach,
    Done,
    EngineDied,
    FailureCounted,
    Hello,
    Imported,
    LogLevel,
    Ready,
    RunningRequests,
    StateChanged,
    Stop,
    TelemetryLine,
)
from lmi_vllm.extras.front_ends.client_model import ClientModel
from lmi_vllm.extras.front_ends.forwarding import Forwarder
from lmi_vllm.extras.front_ends.shared_counters import CounterRow, SharedCounters
from lmi_vllm.inference.admission import Admission
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.context import ServerEvents, error_statuses, running_extras
from lmi_vllm.server.listeners import Listeners, open_front_end

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 0.5


class FrontEndProcess:
    """Answers inference requests over an engine that another process started."""

    def __init__(self, channel: Channel, hello: Hello) -> None:
        self._channel = channel
        self._hello = hello
        self._row: CounterRow = SharedCounters(Path(hello.counters), hello.processes).row(hello.row)
        self._lifecycle = Lifecycle()
        self._lifecycle.on_failure.append(lambda cause: channel.send(FailureCounted(cause)))
        self._queue = Admission(self._lifecycle, slots=self._row)
        self._service = InferenceService(self._queue, statuses=error_statuses(hello.settings))
        self._events = ServerEvents(is_first=False)
        self._model = ClientModel(self._service, self._events, channel)
        self._begin: Begin | None = None
        self._listeners: Listeners | None = None
        self._forwarder: Forwarder | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()

    async def run(self) -> None:
        """Serve until the first process sends `Stop` or is gone."""
        hello = self._hello
        self._service.telemetry.send_line = self._send_line
        async with running_extras(self._service, hello.settings, hello.environ, self._events):
            self._spawn(self._import())
            listening = asyncio.create_task(self._listen())
            failing = asyncio.create_task(self._failed.wait())
            await asyncio.wait({listening, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not self._failed.is_set():
                await listening
            await self._close()

    async def _listen(self) -> None:
        """Handle messages of the first process until `Stop`, or until it is gone."""
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
                self._channel.resolve(message)
            case _:
                self._apply(message)

    def _apply(self, message: object) -> None:
        match message:
            case StateChanged():
                self._queue.resize(message.limit)
                self._lifecycle.mirror(message.state, has_model=message.has_model)
            case CancelRequests():
                self._queue.cancel_all()
            case EngineDied():
                self._model.engine_died()
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
        await self._model.load(self._hello.arguments)
        self._channel.send(Imported())

    async def _join(self, begin: Begin) -> None:
        """Join the engine; the port opens with the first list of adapters."""
        is_first = self._begin is None
        await self._model.join(begin, is_first=is_first)
        self._queue.resize(begin.limit)
        if is_first:
            self._spawn(self._report_engine())
        self._begin = begin
        self._channel.send(Ready())

    async def _detach(self, message: Detach) -> None:
        await self._model.leave()
        self._channel.send(Done(message.number))

    async def _route(self, message: AdapterList) -> None:
        """Route by the list; the first list opens the port."""
        if self._begin is None:
            raise RuntimeError("the engine has not been joined")
        await self._model.follow(message)
        if self._listeners is None:
            begin, hello = self._begin, self._hello
            self._forwarder = Forwarder(begin.first)
            self._listeners = await open_front_end(
                self._service, hello.settings, hello.environ, begin.address, self._forwarder
            )
        self._channel.send(Done(message.number))

    async def _report_engine(self) -> None:
        """Report liveness and this process's requests in the engine, twice a second."""
        reported: tuple[str, ...] = ()
        while True:
            figures = self._model.figures()
            self._row.report_engine(figures.running, figures.steps, figures.not_finite)
            if figures.requests is not None and figures.requests != reported:
                reported = figures.requests
                self._channel.send(RunningRequests(reported))
            await asyncio.sleep(REPORT_SECONDS)

    def _send_line(self, text: str) -> None:
        self._channel.send(TelemetryLine(text))

    async def _close(self) -> None:
        await self._queue.wait_own(CUT_OFF_ANSWER_SECONDS)
        for end in self._events.on_drained:
            await end()
        if self._listeners is not None:
            await self._listeners.close()
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._model.close()


async def serve(descriptor: int) -> None:
    """Run a front-end process over this end of the socket pair."""
    channel = await Channel.over(socket.socket(fileno=descriptor))
    hello = await channel.receive()
    if not isinstance(hello, Hello):
        raise RuntimeError("the first message is no Hello")
    configure_server_logging(hello.settings, hello.environ)
    await FrontEndProcess(channel, hello).run()


def main() -> None:
    """Run as a child process; the arguments are the socket's descriptor and the parent's pid."""
    descriptor, parent = map(int, sys.argv[1:3])
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(descriptor))
        logging.shutdown()
        end_process(0)


if __name__ == "__main__":
    main()
