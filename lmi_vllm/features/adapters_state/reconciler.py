"""The reconciler of this server: brings its registry to the shared adapters, one by one."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import (
    AdapterConflictError,
    LmiError,
    ResourceNotFoundError,
)
from lmi_vllm.features.adapters_state.shared_object import ReplicatedAdapters

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 2.0  # before the second try of an adapter; each try doubles it
MAX_RETRY_SECONDS: Final = 30.0
MAX_CONCURRENT: Final = 4


@dataclass(slots=True)
class WantedAdapters:
    """What the registry is to have: what is shared, and before it the calls' `pending` changes."""

    shared: ReplicatedAdapters = field(default_factory=ReplicatedAdapters)
    pending: dict[str, Adapter | None] = field(default_factory=dict)  # not written; None: removed

    def __iter__(self) -> Iterator[str]:
        return iter({*self.shared.adapters, *self.pending})

    def get(self, name: str) -> Adapter | None:
        """Return the adapter of this name; None where there is to be none."""
        return self.pending[name] if name in self.pending else self.shared.adapters.get(name)

    def is_removed(self, name: str) -> bool:
        """Whether a call has removed the name, so that no store of adapters brings it back."""
        return self.get(name) is None and (name in self.pending or self.shared.is_removed(name))

    def written(self, changes: Mapping[str, Adapter | None], shared: ReplicatedAdapters) -> None:
        """Take over what was written; a change that a call has made since stays pending."""
        self.shared = shared
        for name, adapter in changes.items():
            if self.pending.get(name) is adapter:
                self.pending.pop(name, None)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter could not be applied, and when to try again (on the clock `now`)."""

    wanted: Adapter | None
    text: str
    retry_at: float
    tries: int = 1


class OutdatedError(LmiError):
    """What was to be applied is no longer wanted: a call, or another replica, was faster."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What a task applies, and the slot that it holds until the registry has it."""

    wanted: Adapter | None
    slot: contextlib.ExitStack


# Of the current task; None in a task of a call.
_APPLIED: Final[ContextVar[Applied | None]] = ContextVar("applied", default=None)


class AdapterReconciler:
    """Brings the registry to what is `wanted` by name; `on_done` is called as each task ends."""

    def __init__(
        self,
        registry: AdapterRegistry,
        drop_seconds: Callable[[], float],
        now: Callable[[], float],
        on_done: Callable[[], None],
        wanted: WantedAdapters,
    ) -> None:
        self._registry = registry
        self._drop_seconds = drop_seconds
        self._now = now
        self._on_done = on_done
        self._wanted = wanted
        self._failures: dict[str, Failure] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._is_closed = False

    @property
    def is_applying(self) -> bool:
        """Whether the current task is one of the reconciler's, and not a call's."""
        return _APPLIED.get() is not None

    def on_applied(self) -> None:
        """Release the slot of the current task: it only waits for requests on the old weights."""
        if (applied := _APPLIED.get()) is not None:
            applied.slot.close()

    def check(self, name: str) -> None:
        """Return when the current task may change `name`, whose lock it holds.

        Raises:
            OutdatedError: it is the reconciler's, and something else is wanted by now.
        """
        applied = _APPLIED.get()
        if applied is not None and not are_equal(applied.wanted, self._wanted.get(name)):
            raise OutdatedError(f"The adapter {name} was changed by a call meanwhile")

    def registered(self, name: str) -> Adapter | None:
        """Return the adapter of this name as it is shared; None without one."""
        return as_shared(self._registry.describe(name) if name in self._registry else None)

    def is_as_wanted(self, name: str) -> bool:
        """Whether the registry has under this name what is wanted."""
        current = self._registry.describe(name) if name in self._registry else None
        wanted = self._wanted.get(name)
        if current is None or current.is_local or current.is_from_store:
            is_hidden = current is not None and current.is_from_store
            return wanted is None and not (is_hidden and self._wanted.is_removed(name))
        return are_equal(current, wanted)

    def is_served(self, name: str) -> bool:
        """Whether no request gets another's weights, or none, for an adapter of a call."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return True
        current = self._registry.describe(name) if name in self._registry else None
        return current is not None and (not current.is_from_store or current.src == wanted.src)

    async def wait(self, name: str, seconds: float) -> None:
        """Wait until nothing is applied to this adapter."""
        if (task := self._tasks.get(name)) is not None:
            await asyncio.wait({task}, timeout=seconds)

    @property
    def missing(self) -> Mapping[str, str]:
        """The reason by name for each adapter that is not as it is wanted."""
        failures = self._failures
        return {
            name: failures[name].text if name in failures else "not yet"
            for name in sorted(self._different())
        }

    def close(self) -> None:
        """Cancel the running tasks, and start no more."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()

    def reconcile(self) -> set[asyncio.Task[None]]:
        """Start a task for each adapter that is not as wanted; return all running tasks."""
        different = self._different()
        self._failures = {name: self._failures[name] for name in {*self._failures} & different}
        for name in set() if self._is_closed else different - {*self._tasks}:
            wanted, failure = self._wanted.get(name), self._failures.get(name)
            is_new = failure is None or not are_equal(failure.wanted, wanted)
            if is_new or (failure is not None and self._now() >= failure.retry_at):
                task = self._tasks[name] = asyncio.create_task(self._reconcile_one(name))
                task.add_done_callback(functools.partial(self._on_task_done, name, wanted))
        return set(self._tasks.values())

    def _different(self) -> set[str]:
        names = {*self._wanted, *(adapter.name for adapter in self._registry)}
        return {name for name in names if not self.is_as_wanted(name)}

    def _on_task_done(self, name: str, wanted: Adapter | None, task: asyncio.Task[None]) -> None:
        """Remember a failure, of whatever kind: what is not retried would be wrong for good."""
        self._tasks.pop(name, None)
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._failures.pop(name, None)
        else:
            text = error.text if isinstance(error, LmiError) else repr(error)
            logger.error("the shared adapter %s cannot be applied: %s", name, text)
            before = self._failures.get(name)
            is_repeated = before is not None and are_equal(before.wanted, wanted)
            tries = before.tries + 1 if before is not None and is_repeated else 1
            pause = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 8), MAX_RETRY_SECONDS)
            self._failures[name] = Failure(wanted, text, self._now() + pause, tries)
        self._on_done()

    async def _reconcile_one(self, name: str) -> None:
        """Register, replace or update the adapter; unregister it where none is wanted."""
        with contextlib.ExitStack() as slot:
            # An adapter that is removed waits for its requests: it takes none of the slots.
            if self._wanted.get(name) is not None:
                await self._slots.acquire()
                slot.callback(self._slots.release)
            wanted = self._wanted.get(name)
            if not self.is_as_wanted(name):
                _APPLIED.set(Applied(wanted, slot))
                with suppress(OutdatedError, ResourceNotFoundError):
                    await self._apply(name, wanted)

    async def _apply(self, name: str, wanted: Adapter | None) -> None:
        registry = self._registry
        if wanted is None:
            await registry.unregister(name, self._drop_seconds())
            return
        if name not in registry:
            await registry.register(wanted)
            return
        current = registry.describe(name)
        if current.is_local:
            raise AdapterConflictError(f"The adapter {name} is one of the model directory's")
        is_other = current.is_from_store or current.revision != wanted.revision
        if is_other or (current.pin and not wanted.pin):  # an update cannot unpin
            await registry.replace(wanted, self._drop_seconds())
            return
        await registry.update(name, functools.partial(_with_flags, wanted), self._drop_seconds())


def _with_flags(wanted: Adapter, current: Adapter) -> Adapter:
    return replace(current, preload=wanted.preload, pin=wanted.pin, options=wanted.options)


def as_shared(adapter: Adapter | None) -> Adapter | None:
    """Return what a call registered, as it is shared; None for what else there is."""
    if adapter is None or adapter.is_local or adapter.is_from_store:
        return None
    return as_registered(adapter)


def as_registered(one: Adapter) -> Adapter:
    """Return the adapter as if a call had registered it, not loaded."""
    return Adapter(one.name, one.src, one.preload, one.pin, one.options, revision=one.revision)


def are_equal(one: Adapter | None, other: Adapter | None) -> bool:
    """Whether two adapters are the same to those who share them."""
    if one is None or other is None:
        return one is other
    return (
        one.revision == other.revision
        and one.src == other.src
        and one.preload == other.preload
        and one.pin == other.pin
        and one.options == other.options
    )
