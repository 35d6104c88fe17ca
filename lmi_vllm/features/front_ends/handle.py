"""The first process's handle of another front-end process: its channel and its calls."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import EngineFailureError, LmiError
from lmi_vllm.features.front_ends.channel import (
    AdapterList,
    CallReply,
    Channel,
    ChannelClosedError,
    ConfirmState,
    FailureCounted,
    HoldAdapter,
    JoinEngine,
    LeaveEngine,
    LoadAdapter,
    ProcessReady,
    ProcessSetup,
    ReleaseAdapter,
    RequestStarted,
    RunningRequests,
    StopProcess,
    TelemetryLine,
    VllmImported,
    WakeModel,
)
from lmi_vllm.features.front_ends.first import FirstProcess
from lmi_vllm.features.front_ends.mirrored_adapters import without_hooks
from lmi_vllm.features.front_ends.series import OTHER_PROCESSES, forget_process
from lmi_vllm.features.front_ends.starts import FrontEndChild, StartFrontEnd

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 3.0
DETACH_SECONDS: Final = 8.0  # a client of a dead engine ends its requests first
ADAPTER_GRACE_SECONDS: Final = 15.0  # beyond the timeout of the requests


class ProcessEndedError(Exception):
    """The process ended before the awaited event."""


@dataclass(slots=True)
class FrontEnd:
    """Another front-end process: its state, its channel, and its calls to the first one."""

    first: FirstProcess
    row: int
    start: StartFrontEnd
    imported: asyncio.Event = field(default_factory=asyncio.Event)
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    is_serving: asyncio.Event = field(default_factory=asyncio.Event)
    has_served: bool = False  # it reports that it lives, also while there is no engine
    is_asked: bool = False  # to join the engine
    is_routed: bool = False  # it is sent every change of the adapters
    ending: str = ""
    pid: int = 0
    _is_killed: bool = False  # because it hangs
    _channel: Channel | None = None
    _process: FrontEndChild | None = None
    _engine_requests: set[str] = field(default_factory=set)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def channel(self) -> Channel:
        """The channel to the process.

        Raises:
            RuntimeError: the process has not been started.
        """
        if self._channel is None:
            raise RuntimeError("the process has not been started")
        return self._channel

    async def run(self, setup: ProcessSetup) -> None:
        """Start the process and serve its calls until it ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await self.start(theirs, self.imported)
        self.pid = self._process.pid
        OTHER_PROCESSES.add(self.pid)
        self._channel = await Channel.over(ours)
        ending = asyncio.create_task(_end_channel(self._process, ours))
        try:
            self._channel.send(setup)
            while True:
                self._answer(await self._channel.receive())
        except ChannelClosedError:
            self._channel.close()
        finally:
            ending.cancel()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # without its channel it can do nothing
            code = await self._process.wait()
            # Abort its requests before their adapters are released: the engine still runs them.
            await self.first.abort(self._engine_requests)
            for call in self._calls.values():
                call.cancel()
            self.ending = f"signal {-code}" if code < 0 else f"code {code}"
            forget_process(self.pid)
            self._ended.set()

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait until the process has set `event`.

        Raises:
            ProcessEndedError: it ended before.
        """
        waits = [asyncio.create_task(one.wait()) for one in (event, self._ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not event.is_set():
            raise ProcessEndedError(self.ending)

    async def join(self, message: JoinEngine) -> None:
        """Let the process join an engine; returns once it has.

        Raises:
            ProcessEndedError: it ended before.
        """
        self.is_asked = True
        self.joined.clear()  # by an engine that was left before it had replied
        self.channel.send(message)
        await self.wait_for(self.joined)

    def send(self, message: object) -> None:
        """Send a message, once the process has been started."""
        if self._channel is not None:
            self._channel.send(message)

    async def send_adapters(
        self,
        adapters: Collection[Adapter],
        shared: Collection[LoadedAdapter],
        timeout_seconds: float,
    ) -> None:
        """Send the list to route by; a process that does not reply in time is killed."""
        message = AdapterList(
            self.channel.new_number(),
            tuple(without_hooks(adapter) for adapter in adapters),
            tuple(shared),
            timeout_seconds,
        )
        try:
            async with asyncio.timeout(timeout_seconds + ADAPTER_GRACE_SECONDS):
                await self.channel.call(message)
        except TimeoutError:
            self.end_hanging()
        except LmiError as error:
            logger.debug("front-end process %d: %s", self.pid, error.text)  # it has ended

    async def confirm_state(self) -> None:
        """Return once the process follows the last state; one that does not reply is killed."""
        if self._channel is None or not self.is_serving.is_set():
            return  # it admits no request
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                await self._channel.call(ConfirmState(self._channel.new_number()))
        except TimeoutError:
            self.end_hanging()
        except LmiError as error:
            logger.debug("front-end process %d: %s", self.pid, error.text)  # it has ended

    async def detach(self) -> None:
        """Have the process leave its engine; it is killed if it does not in time."""
        self.is_asked = self.is_routed = False
        self.is_serving.clear()
        if self._channel is None or not self.imported.is_set():
            return  # it has joined no engine yet
        try:
            async with asyncio.timeout(DETACH_SECONDS):
                await self._channel.call(LeaveEngine(self._channel.new_number()))
        except TimeoutError:
            self.end_hanging()
        except LmiError as error:
            logger.debug("front-end process %d: %s", self.pid, error.text)  # it has ended

    async def stop(self) -> None:
        """Stop the process: gracefully, and by SIGKILL after STOP_SECONDS."""
        self.send(StopProcess())
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def end_hanging(self) -> None:
        """End it by SIGKILL and say why; the group starts another. May be called twice."""
        if not self._is_killed:  # its end may take a while, and several calls may wait for it
            logger.error("front-end process %d hangs: it is ended", self.pid)
        self._is_killed, self.has_served = True, False
        self.is_serving.clear()
        self.kill()

    def kill(self) -> None:
        """End the process by SIGKILL; the group starts another."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _answer(self, message: object) -> None:
        match message:
            case VllmImported():
                self.imported.set()
            case ProcessReady():
                self.joined.set()
            case CallReply():
                self.channel.resolve(message)
            case RequestStarted():
                self._engine_requests.add(message.engine_request)
            case RunningRequests():
                self._engine_requests = set(message.engine_requests)
            case _:
                self._serve(message)

    def _serve(self, message: object) -> None:
        match message:
            case FailureCounted() | TelemetryLine():
                self.first.note(message)
            case WakeModel():
                self.first.wake()
            case HoldAdapter():
                self._answer_later(message.number, self._hold(message))
            case LoadAdapter():
                self._answer_later(message.number, self._load(message))
            case ReleaseAdapter() if message.number in self._calls:
                self._calls[message.number].cancel()

    def _answer_later(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._calls[number] = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _: self._calls.pop(number, None))

    async def _hold(self, message: HoldAdapter) -> None:
        """Hold an adapter until the process releases it, or ends: then this task is cancelled."""
        try:
            async with self.first.hold(message.engine_id):
                self.channel.send(CallReply(message.number))
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 (the calling process gets it)
            self._refuse(message.number, error)

    async def _load(self, message: LoadAdapter) -> None:
        try:
            await self.first.load(message.name)
        except Exception as error:  # noqa: BLE001 (the calling process gets it)
            self._refuse(message.number, error)
        else:
            self.channel.send(CallReply(message.number))

    def _refuse(self, number: int, error: Exception) -> None:
        if not isinstance(error, LmiError):
            logger.error("a call of front-end process %d failed", self.pid, exc_info=error)
            error = EngineFailureError()
        self.channel.send(CallReply(number, error))


async def _end_channel(process: FrontEndChild, ours: socket.socket) -> None:
    """Let what the process has sent be the last once it has ended.

    Its end alone does not tell: an engine that was forked meanwhile has a copy of it.
    """
    await process.wait()
    with contextlib.suppress(OSError):  # closed by now
        ours.shutdown(socket.SHUT_RD)
