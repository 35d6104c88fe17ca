"""What calls have one replica do, all replicas do: over one object in S3 that is read often.

A change is carried out here first, then written; another replica's is taken over when it is read.
Of two replicas that change one adapter the one that writes last wins, and no other name is touched.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import (
    AdapterConflictError,
    DownloadError,
    LmiError,
    ResourceNotFoundError,
)
from lmi_vllm.extras.replicas.state import ReplicaReport, Shared, StateObject
from lmi_vllm.sources.base import InterruptedTransferError, ObjectChangedError, UnreachableError

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 20.0
WRITE_SECONDS: Final = 5.0  # that a call waits for its change to be written
RETRY_SECONDS: Final = 30.0  # until an adapter that could not be taken over is tried again
TAKE_OVER_SECONDS: Final = 1.0  # that writing waits for what is taken over
CONFIRM_SECONDS: Final = 30.0  # less than the minute that proxies wait for an answer
CONFIRM_PAUSE_SECONDS: Final = 0.3
TAKEN_AT_ONCE: Final = 4
MOST_CONFLICTS: Final = 20
AWAY: Final = (UnreachableError, InterruptedTransferError, DownloadError)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an adapter could not be taken over, and when to try again."""

    text: str
    again_at: float


class ReplicaAdapters:
    """Keeps a registry and the shared object the same; the registry's `sharing`."""

    def __init__(
        self,
        registry: AdapterRegistry,
        state: StateObject,
        refresh_seconds: float,
        drop_seconds: Callable[[], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._state = state
        self._refresh_seconds = refresh_seconds
        self._drop_seconds = drop_seconds
        self._now = now
        self._shared = Shared()
        self._taken: dict[str, Adapter] = {}  # as they were shared when they were taken over
        self._pending: dict[str, Adapter | None] = {}  # changed here, not written
        self._failures: dict[str, Failure] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(TAKEN_AT_ONCE)
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._reported: tuple[ReplicaReport, float] | None = None
        self._synced_at = now()

    @property
    def age_seconds(self) -> float:
        """Seconds since the object was last read, and what was pending written."""
        return self._now() - self._synced_at

    @property
    def missing(self) -> Mapping[str, str]:
        """What this server does not have as it is shared, with the reason."""
        wanted = {**self._shared.adapters, **self._pending}
        names = {*self._taken, *wanted}
        lacking = [name for name in names if not _same(self._own(name), wanted.get(name))]
        failures = self._failures
        return {
            name: failures[name].text if name in failures else "not yet" for name in sorted(lacking)
        }

    async def begin(self) -> None:
        """Return when everything that is shared is here, however long the store is away.

        Raises:
            ModelSourceError: the object is not ours.
            DownloadError: the store refuses.
        """
        while True:
            try:
                await self.sync(all_of_it=True)
            except (UnreachableError, InterruptedTransferError) as error:
                logger.warning(
                    "%s cannot be read, so this server waits: %s", self._state.place, error
                )
                await asyncio.sleep(min(self._refresh_seconds, 1.0))
            else:
                return

    async def run(self) -> None:
        """Keep them the same until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._refresh_seconds)
            self._wake.clear()
            await self._sync_if_possible()

    async def changed(self, name: str) -> None:
        """Write a change that a call has made here; one that was taken over is left alone."""
        own = self._own(name)
        if _same(own, self._taken.get(name)):
            self._pending.pop(name, None)
            return
        self._pending[name] = own
        writing = asyncio.create_task(self._sync_if_possible())
        await asyncio.wait({writing}, timeout=WRITE_SECONDS)

    async def confirm(self, name: str) -> dict[str, str]:
        """Return when every replica that reported within the last minute has the change, or late.

        What comes back are the replicas that have not, by name, each with the reason; the object
        itself where it is out of reach.
        """
        if name in self._pending:
            return {self._state.place: "cannot be written now: the others will have it afterwards"}
        generation, until = self._shared.generation, self._now() + CONFIRM_SECONDS
        while True:
            try:
                async with asyncio.timeout(CONFIRM_SECONDS):
                    others = await asyncio.to_thread(self._state.others)
            except (*AWAY, TimeoutError):
                return {self._state.place: "cannot be read now"}
            lacking = {
                replica: report.missing.get(name, "has not read the change")
                for replica, report in sorted(others.items())
                if report.generation < generation or name in report.missing
            }
            if not lacking or self._now() > until:
                return lacking
            await asyncio.sleep(CONFIRM_PAUSE_SECONDS)

    async def close(self) -> None:
        """End all work and take back the report of this replica."""
        for task in self._work.values():
            task.cancel()
        with suppress(*AWAY, TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._state.leave), WRITE_SECONDS)

    async def sync(self, *, all_of_it: bool = False) -> None:
        """Read, take over, write what is pending, report.

        Raises:
            LmiError, UnreachableError, InterruptedTransferError: the store's.
        """
        async with self._turn:
            await self._read()
            tasks = self._take_over()
            if tasks:
                await asyncio.wait(tasks, timeout=None if all_of_it else TAKE_OVER_SECONDS)
            await self._write_pending()
            self._synced_at = self._now()
            await self._report()

    async def _sync_if_possible(self) -> None:
        try:
            await self.sync()
        except (*AWAY, LmiError) as error:
            logger.error(
                "%s is out of reach, what is known is served: %s", self._state.place, error
            )

    async def _read(self) -> None:
        was_known = self._state.is_known
        new = await asyncio.to_thread(self._state.read)
        if new is not None:
            self._shared = new
        elif was_known and not self._state.is_known:
            logger.error("%s is gone: the adapters stay as they are", self._state.place)
            self._pending = {**self._shared.adapters, **self._pending}

    async def _write_pending(self) -> None:
        for _ in range(MOST_CONFLICTS):
            if not self._pending:
                return
            changes = dict(self._pending)
            new = self._shared.changed(changes)
            try:
                await asyncio.to_thread(self._state.write, new)
            except ObjectChangedError:
                await self._read()
                self._take_over()
                continue
            self._shared = new
            self._written(changes)
        raise UnreachableError(f"{MOST_CONFLICTS} writes in a row were another's")

    def _written(self, changes: Mapping[str, Adapter | None]) -> None:
        for name, adapter in changes.items():
            self._failures.pop(name, None)
            if adapter is None:
                self._taken.pop(name, None)
            else:
                self._taken[name] = adapter
            if self._pending.get(name) is adapter:
                self._pending.pop(name, None)

    def _take_over(self) -> set[asyncio.Task[None]]:
        """Begin what is to be done for the registry to be as the object; return all that runs."""
        for name in {*self._taken, *self._shared.adapters} - {*self._pending, *self._work}:
            wanted, failure = self._shared.adapters.get(name), self._failures.get(name)
            is_due = failure is not None and self._now() >= failure.again_at
            if is_due or not _same(wanted, self._taken.get(name)):
                task = self._work[name] = asyncio.create_task(self._take(name, wanted))
                task.add_done_callback(lambda _, name=name: self._done(name))  # type: ignore[misc]
        return set(self._work.values())

    def _done(self, name: str) -> None:
        self._work.pop(name, None)
        self._wake.set()

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
            self._failures[name] = Failure(error.text, self._now() + RETRY_SECONDS)
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

    async def _report(self) -> None:
        """Say what is here, where that has changed or a while has passed."""
        report = ReplicaReport(self._shared.generation, self.missing)
        if self._reported is not None:
            before, at = self._reported
            if before == report and self._now() < at + REPORT_SECONDS:
                return
        await asyncio.to_thread(self._state.report, report)
        self._reported = report, self._now()

    def _own(self, name: str) -> Adapter | None:
        """What this server has of the name by a call, as it is shared."""
        if name not in self._registry:
            return None
        own = self._registry.describe(name)
        if own.is_local or own.is_found:
            return None
        return Adapter(name, own.src, own.preload, own.pin, own.options, revision=own.revision)


def _same(one: Adapter | None, other: Adapter | None) -> bool:
    return _shown(one) == _shown(other)


def _shown(adapter: Adapter | None) -> tuple[object, ...] | None:
    if adapter is None:
        return None
    return adapter.revision, adapter.src, adapter.preload, adapter.pin, dict(adapter.options)
