"""The first process's side: the others' counter rows, clients of the engine, and requests."""

import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import MAX_FINDS, AdapterRegistry, evicted
from lmi_vllm.engine.base import Engine, EngineClient
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.errors import EngineDeadError, UnknownAdapterError
from lmi_vllm.features.front_ends.channel import FailureCounted, StateChanged, TelemetryLine
from lmi_vllm.features.front_ends.shared_counters import SharedCounters
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments

logger = logging.getLogger(__name__)


class SharedEngine(Engine, Protocol):
    """An engine that has clients in other processes."""

    @property
    def arguments(self) -> EngineArguments:
        """The arguments that the engine was started with."""
        ...

    @property
    def shared_adapters(self) -> tuple[LoadedAdapter, ...]:
        """The adapters loaded in the engine."""
        ...

    def hold_for_another(self, engine_id: int) -> AbstractAsyncContextManager[None]:
        """Return what holds an adapter's slot for another client of the engine."""
        ...

    async def abort_for_another(self, engine_requests: Collection[str]) -> None:
        """End requests of another client, by their ids in the engine."""
        ...

    def complete(self, client: EngineClient) -> EngineClient:
        """Return the client with what only the running engine knows: address and base adapter."""
        ...


class EngineClients:
    """Allocates a counter row and a client of the engine to every process; row 0 is the first's."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.rows = rows
        self.counters_path = folder / "counters"
        self.counters = SharedCounters(self.counters_path, rows)
        self._folder = folder
        self._engines = 0
        self._used: set[int] = set()  # rows whose clients of the engine are, or were, taken
        self._clients: tuple[EngineClient, ...] = ()

    def begin(self, rows: Iterable[int]) -> None:
        """Free every client of the next engine except those of the processes with these rows."""
        self._used = set(rows)

    def new(self) -> tuple[EngineClient, ...]:
        """Return one client for each process, of the engine that is started next."""
        self._engines += 1
        folder = self._folder / f"engine-{self._engines}"
        folder.mkdir()
        self._clients = tuple(
            EngineClient(
                index, self.rows, f"ipc://{folder}/in{index}", f"ipc://{folder}/out{index}"
            )
            for index in range(self.rows)
        )
        first, *rest = self._clients
        return replace(first, others=self.counters.row(0)), *rest

    @property
    def is_exhausted(self) -> bool:
        """Whether no client is left, so that no process can be replaced at this engine."""
        return len(self._used) == self.rows - 1

    def take(self) -> int:
        """Take the first row whose client of the engine has not been taken, and return it."""
        row = min(set(range(1, self.rows)) - self._used)
        self._used.add(row)
        return row

    def of(self, row: int) -> EngineClient:
        """Return the client that belongs to a row."""
        return self._clients[row]


class FirstProcess:
    """Serves the other processes' calls: adapter slots, adapter loads, aborts and records."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self.engine: SharedEngine | None = None
        self._adapters: AdapterRegistry | None = None

    def use(self, engine: SharedEngine, adapters: AdapterRegistry) -> None:
        """Serve calls of the processes over this engine from now on."""
        self.engine, self._adapters = engine, adapters

    def leave(self) -> None:
        """Drop the engine, which is closing or has died."""
        self.engine = None

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name."""
        return () if self._adapters is None else tuple(self._adapters)

    def state(self) -> StateChanged:
        """Return the server's state as the message to the other processes."""
        lifecycle, queue = self._service.lifecycle, self._service.queue
        return StateChanged(lifecycle.state, queue.limit, lifecycle.has_model, lifecycle.is_resting)

    @contextlib.asynccontextmanager
    async def hold(self, engine_id: int) -> AsyncIterator[None]:
        """Hold an adapter's slot for a request of another process.

        Yields once the request may use it.

        Raises:
            LmiError: the adapter cannot be used, or the engine is gone.
        """
        if self.engine is None:
            raise EngineDeadError
        async with self.engine.hold_for_another(engine_id):
            yield

    async def load(self, name: str) -> None:
        """Load an adapter that a request of another process names.

        Raises:
            LmiError: see `AdapterRegistry.hold`.
        """
        if self._adapters is None:
            raise EngineDeadError
        for _ in range(MAX_FINDS):
            is_known = await self._adapters.find_on_demand(name)
            with contextlib.suppress(UnknownAdapterError):
                await self._adapters.load_on_first_use(name)
                return
            if not is_known:
                raise UnknownAdapterError(name)
        raise evicted(name)

    async def abort(self, engine_requests: Collection[str]) -> None:
        """Abort requests in the engine whose process has ended."""
        if self.engine is not None and engine_requests:
            logger.warning("%d requests of a process that ended are aborted", len(engine_requests))
            await self.engine.abort_for_another(engine_requests)

    def wake(self) -> None:
        """Wake the model for a request of another process, which waits by itself."""
        self._service.rest.wanted.set()

    def note(self, message: FailureCounted | TelemetryLine) -> None:
        """Record a failed request, or pass on a telemetry line, of another process."""
        if isinstance(message, FailureCounted):
            self._service.lifecycle.note_failure(message.cause)
            return
        for callback in self._service.telemetry.on_line:
            callback(message.text)
