"""What this server has of the shared adapters: taken over into its registry, one by one."""

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

FIRST_RETRY_SECONDS: Final = 2.0  # until an adapter that could not be taken over is tried again
RETRY_SECONDS: Final = 30.0  # the most that it is, as each try doubles it
TAKEN_AT_ONCE: Final = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter could not be taken over, and when to try again."""

    text: str
    again_at: float
    tries: int = 1


class TakenAdapters:
    """The shared adapters as the registry has them; `on_done` is called as each is taken over."""

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
        self._taken: dict[str, Adapter] = {}  # as they were shared when they were taken over
        self._failures: dict[str, Failure] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(TAKEN_AT_ONCE)

    def own(self, name: str) -> Adapter | None:
        """What this server has of the name by a call, as it is shared."""
        if name not in self._registry:
            return None
        own = self._registry.describe(name)
        if own.is_local or own.is_found:
            return None
        return Adapter(name, own.src, own.preload, own.pin, own.options, revision=own.revision)

    def is_as_shared(self, name: str) -> bool:
        """Whether the registry has what was taken over under this name: no call has changed it."""
        return _same(self.own(name), self._taken.get(name))

    def missing(self, wanted: Mapping[str, Adapter | None]) -> Mapping[str, str]:
        """Return the adapters that differ from `wanted` in the registry, with the reason."""
        names = {*self._taken, *wanted}
        lacking = [name for name in names if not _same(self.own(name), wanted.get(name))]
        failures = self._failures
        return {
            name: failures[name].text if name in failures else "not yet" for name in sorted(lacking)
        }

    def written(self, name: str, adapter: Adapter | None) -> None:
        """Record that the registry's entry equals the shared one."""
        self._failures.pop(name, None)
        if adapter is None:
            self._taken.pop(name, None)
        else:
            self._taken[name] = adapter

    def close(self) -> None:
        """End all work."""
        for task in self._work.values():
            task.cancel()

    def take_over(
        self, shared: Mapping[str, Adapter], pending: Collection[str]
    ) -> set[asyncio.Task[None]]:
        """Begin what is to be done for the registry to be as the object; return all that runs."""
        for name in {*self._taken, *shared} - {*pending, *self._work}:
            wanted, failure = shared.get(name), self._failures.get(name)
            is_due = failure is not None and self._now() >= failure.again_at
            if is_due or not _same(wanted, self._taken.get(name)):
                task = self._work[name] = asyncio.create_task(self._take(name, wanted))
                task.add_done_callback(lambda _, name=name: self._done(name))  # type: ignore[misc]
        return set(self._work.values())

    def _done(self, name: str) -> None:
        self._work.pop(name, None)
        self._on_done()

    async def _take(self, name: str, wanted: Adapter | None) -> None:
        """Have the registry have this adapter, or none of that name."""
        if wanted is None:
            self._taken.pop(name, None)
            self._failures.pop(name, None)
            with suppress(ResourceNotFoundError):
                await self._registry.unregister(name, self._drop_seconds())
            return
        self._taken[name] = wanted
        try:
            async with self._slots:
                await self._put(wanted)
        except LmiError as error:
            logger.error("adapter %s, which is shared, cannot be had here: %s", name, error.text)
            before = self._failures.get(name)
            tries = 1 if before is None else before.tries + 1
            pause = min(FIRST_RETRY_SECONDS * 2 ** min(tries - 1, 8), RETRY_SECONDS)
            self._failures[name] = Failure(error.text, self._now() + pause, tries)
        else:
            self._failures.pop(name, None)

    async def _put(self, wanted: Adapter) -> None:
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


def _same(one: Adapter | None, other: Adapter | None) -> bool:
    return _shown(one) == _shown(other)


def _shown(adapter: Adapter | None) -> tuple[object, ...] | None:
    if adapter is None:
        return None
    return adapter.revision, adapter.src, adapter.preload, adapter.pin, dict(adapter.options)
