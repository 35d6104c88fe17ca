"""The reconciler of this server: brings its registry to the shared adapters, one by one."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterConflictError, LmiError, ResourceNotFoundError

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 2.0  # before the second try of an adapter; each try doubles it
MAX_RETRY_SECONDS: Final = 30.0
MAX_CONCURRENT: Final = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter could not be applied, and when to try again (on the clock `now`)."""

    text: str
    retry_at: float
    tries: int = 1


class AdapterReconciler:
    """Applies the shared adapters to the registry; `on_done` is called as each task ends."""

    def __init__(
        self,
        registry: AdapterRegistry,
        drop_seconds: Callable[[], float],
        now: Callable[[], float],
        on_done: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._drop_seconds = drop_seconds
        self._now = now
        self._on_done = on_done
        self._applied: dict[str, Adapter] = {}  # as they were shared when they were applied
        self._failures: dict[str, Failure] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    def registered(self, name: str) -> Adapter | None:
        """Return the adapter that a call registered, as it is shared; None without one."""
        if name not in self._registry:
            return None
        own = self._registry.describe(name)
        if own.is_local or own.is_found:
            return None
        return Adapter(name, own.src, own.preload, own.pin, own.options, revision=own.revision)

    def is_as_shared(self, name: str) -> bool:
        """Whether the registry has what was applied under this name: no call has changed it."""
        return _are_equal(self.registered(name), self._applied.get(name))

    def missing(self, wanted: Mapping[str, Adapter | None]) -> Mapping[str, str]:
        """Return the reason by name for each adapter that differs from `wanted` in the registry."""
        names = {*self._applied, *wanted}
        lacking = [
            name for name in names if not _are_equal(self.registered(name), wanted.get(name))
        ]
        failures = self._failures
        return {
            name: failures[name].text if name in failures else "not yet" for name in sorted(lacking)
        }

    def written(self, name: str, adapter: Adapter | None) -> None:
        """Record that the shared object has this adapter now; None: that it has none."""
        self._failures.pop(name, None)
        if adapter is None:
            self._applied.pop(name, None)
        else:
            self._applied[name] = adapter

    def close(self) -> None:
        """Cancel the running tasks."""
        for task in self._tasks.values():
            task.cancel()

    def reconcile(
        self, shared: Mapping[str, Adapter], pending: Collection[str]
    ) -> set[asyncio.Task[None]]:
        """Start a task for each adapter that differs from `shared`; return all running tasks.

        Names in `pending` are left alone: their change is newer and not written yet.
        """
        for name in {*self._applied, *shared} - {*pending, *self._tasks}:
            wanted, failure = shared.get(name), self._failures.get(name)
            is_due = failure is not None and self._now() >= failure.retry_at
            if is_due or not _are_equal(wanted, self._applied.get(name)):
                task = self._tasks[name] = asyncio.create_task(self._reconcile_one(name, wanted))
                task.add_done_callback(lambda _, name=name: self._on_task_done(name))  # type: ignore[misc]
        return set(self._tasks.values())

    def _on_task_done(self, name: str) -> None:
        self._tasks.pop(name, None)
        self._on_done()

    async def _reconcile_one(self, name: str, wanted: Adapter | None) -> None:
        """Register, replace or update the adapter; unregister it where `wanted` is None."""
        if wanted is None:
            self._applied.pop(name, None)
            self._failures.pop(name, None)
            with suppress(ResourceNotFoundError):
                await self._registry.unregister(name, self._drop_seconds())
            return
        self._applied[name] = wanted
        try:
            async with self._slots:
                await self._apply(wanted)
        except LmiError as error:
            logger.error("adapter %s, which is shared, cannot be had here: %s", name, error.text)
            before = self._failures.get(name)
            tries = 1 if before is None else before.tries + 1
            pause = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 8), MAX_RETRY_SECONDS)
            self._failures[name] = Failure(error.text, self._now() + pause, tries)
        else:
            self._failures.pop(name, None)

    async def _apply(self, wanted: Adapter) -> None:
        registry, name = self._registry, wanted.name
        if name not in registry:
            await registry.register(wanted)
            return
        current = registry.describe(name)
        if current.is_local:
            raise AdapterConflictError(f"The adapter {name} is one of the model directory's")
        if current.is_found or current.revision != wanted.revision:
            await registry.replace(wanted, self._drop_seconds())
            return
        changed = replace(current, preload=wanted.preload, pin=wanted.pin, options=wanted.options)
        await registry.update(name, changed, self._drop_seconds())


def _are_equal(one: Adapter | None, other: Adapter | None) -> bool:
    return _shared_fields(one) == _shared_fields(other)


def _shared_fields(adapter: Adapter | None) -> tuple[object, ...] | None:
    if adapter is None:
        return None
    return adapter.revision, adapter.src, adapter.preload, adapter.pin, dict(adapter.options)
