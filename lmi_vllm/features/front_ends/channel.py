"""The messages between the first process and the other front-end processes, and their channel.

Both ends are this program, started by the same user over an inherited socket pair: pickles are
read from no other program.
"""

import asyncio
import copyreg
import itertools
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import EngineClient
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import Fault, LmiError, NotReadyError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import EngineArguments, ServingProfile

_LENGTH: Final = struct.Struct("!I")


@dataclass(frozen=True, slots=True)
class ProcessSetup:
    """The first message to a new process: what it needs before the engine is there."""

    settings: Settings
    environ: Mapping[str, str]
    arguments: EngineArguments
    counters: str  # path of the shared counters
    processes: int  # their number of rows
    row: int  # of this process


@dataclass(frozen=True, slots=True)
class JoinEngine:
    """The engine is up: join it and answer at the address.

    `first` is the Unix socket of the first process, which answers what this one cannot; `limit` is
    the most requests in flight over all processes.
    """

    settings: Settings
    client: EngineClient
    arguments: EngineArguments
    profile: ServingProfile
    model_url: str
    model_name: str
    address: ListenAddress
    first: str
    limit: int


@dataclass(frozen=True, slots=True)
class AdapterList:
    """The complete list of adapters; answered once no request uses any other adapter."""

    number: int
    adapters: tuple[Adapter, ...]
    shared: tuple[LoadedAdapter, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The state of the server, the limit of requests in flight, and whether a model is loaded."""

    state: State
    limit: int
    has_model: bool
    is_resting: bool = False  # it sleeps, or wakes, and requests wait for it


@dataclass(frozen=True, slots=True)
class ConfirmState:
    """Answered at once: the process follows every state that was sent before."""

    number: int


@dataclass(frozen=True, slots=True)
class WakeModel:
    """A request of this process came as the model fell asleep, and waits for it."""


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """Cancel requests in flight; each is answered with an error."""


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine has died; only its parent, the first process, is notified by the kernel."""


@dataclass(frozen=True, slots=True)
class LeaveEngine:
    """Leave the engine, which ends or has ended; answered when the sockets are closed."""

    number: int


@dataclass(frozen=True, slots=True)
class LogLevel:
    """The level from which on the process logs."""

    level: int


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Close the port and end."""


@dataclass(frozen=True, slots=True)
class VllmImported:
    """The process has imported vLLM and can join an engine."""


@dataclass(frozen=True, slots=True)
class ProcessReady:
    """The process answers requests, or has given up an engine that it was to leave."""


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A request is about to go to the engine, under this id there."""

    engine_request: str


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """The ids of all requests that this process has in the engine."""

    engine_requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HoldAdapter:
    """A request needs an adapter's slot; answered once it holds one."""

    number: int
    engine_id: int


@dataclass(frozen=True, slots=True)
class ReleaseAdapter:
    """The request of the `HoldAdapter` with this number has ended, or has stopped waiting."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """A request names an adapter that is registered but not loaded."""

    number: int
    name: str


@dataclass(frozen=True, slots=True)
class FailureCounted:
    """A request failed: the fault of its error, or the status of its answer."""

    cause: Fault | int


@dataclass(frozen=True, slots=True)
class TelemetryLine:
    """A line for SageMaker's telemetry file."""

    text: str


@dataclass(frozen=True, slots=True)
class CallReply:
    """The reply to the call with this number: done, or refused with `error`."""

    number: int
    error: LmiError | None = None


class ChannelClosedError(Exception):
    """The other process is gone."""


@dataclass(slots=True)
class Channel:
    """One end of a socket pair: ordered messages, and calls with replies."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _waiting: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)

    @classmethod
    async def over(cls, end: socket.socket) -> "Channel":
        """Return the channel over one end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: object) -> None:
        """Send a message; it is dropped where the other process is gone."""
        if self.writer.is_closing():
            return
        payload = pickle.dumps(message)
        self.writer.write(_LENGTH.pack(len(payload)) + payload)

    async def receive(self) -> object:
        """Return the next message.

        Raises:
            ChannelClosedError: the other process is gone.
        """
        try:
            (length,) = _LENGTH.unpack(await self.reader.readexactly(_LENGTH.size))
            return pickle.loads(await self.reader.readexactly(length))
        except (EOFError, OSError) as error:  # an IncompleteReadError is the former
            raise ChannelClosedError from error

    def new_number(self) -> int:
        """Return a number that no call of this end has had."""
        return next(self._numbers)

    async def call(self, message: Any) -> None:
        """Send a message that has a number, and return when the other end has replied to it.

        Raises:
            LmiError: the other end refused the call with it.
            NotReadyError: the other process is gone.
        """
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[message.number] = answer
        try:
            self.send(message)
            if self.writer.is_closing():
                raise _gone()
            await answer
        finally:
            self._waiting.pop(message.number, None)

    def resolve(self, done: CallReply) -> None:
        """Resolve the call that `done` replies to; a reply that no caller waits for is ignored."""
        waiting = self._waiting.get(done.number)
        if waiting is None or waiting.done():
            return
        if done.error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(done.error)

    def close(self) -> None:
        """Close the channel; calls without a reply raise NotReadyError."""
        self.writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_gone())


def _gone() -> NotReadyError:
    return NotReadyError("another process of this server ended while it was asked")


def _read_only(mapping: dict[Any, Any]) -> "MappingProxyType[Any, Any]":
    return MappingProxyType(mapping)


# Pickle cannot find the type by its name, `builtins.mappingproxy`.
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))
