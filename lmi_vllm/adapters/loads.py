"""Which adapters the engine holds, their users, and the locks under which that changes."""

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

FIRST_ENGINE_ID: Final = 1000  # below are ids the engine keeps for itself

P = ParamSpec("P")
R = TypeVar("R")


class AdapterLoads:
    """Loads adapters into the engine and unloads them, one call at a time; ids are never reused."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = asyncio.Lock()
        self._ids = itertools.count(FIRST_ENGINE_ID)

    async def load(self, adapter: Adapter) -> Adapter:
        """Return the adapter loaded, under a new id unless it already is; pinned if it is to be."""
        async with self._lock:
            if adapter.ref is None:
                ref = AdapterRef(adapter.name, adapter.path, next(self._ids), adapter.pin)
            else:
                ref = replace(adapter.ref, pinned=adapter.pin)
            await self.engine.load_adapter(ref)
        return replace(adapter, ref=ref)

    async def unload(self, ref: AdapterRef) -> None:
        """Drop the weights of one load."""
        async with self._lock:
            await self.engine.unload_adapter(ref)

    async def move_to(self, engine: Engine) -> int:
        """Load into `engine` from now on; the ids of its loads are above the one returned."""
        async with self._lock:
            self.engine = engine
            return next(self._ids)


class KeyedLock:
    """One lock per key, which exists only while it is held or waited for."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key` while the body runs; waiters get it in their order."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._locks[key]


class HasChanges(Protocol):
    """An object whose `uninterrupted` methods run as tasks of their own."""

    changes: set[asyncio.Task[Any]]  # that have not ended


S = TypeVar("S", bound=HasChanges)


def uninterrupted(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return a method that is carried out to its end also when its caller is cancelled."""

    @functools.wraps(method)
    async def call(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        task = asyncio.create_task(method(owner, *args, **kwargs))
        owner.changes.add(task)
        task.add_done_callback(owner.changes.discard)
        task.add_done_callback(_log_refusal)
        return await asyncio.shield(task)

    return call


def _log_refusal(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("adapter call refused: %s", error)
