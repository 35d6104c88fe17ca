"""Adapters replicated between servers: over one object in S3 that each of them polls.

A change by a call is applied here first, then written; another replica's is applied once it is
read. Of two replicas that change one adapter the last write wins, and no other name is touched.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import DownloadError, LmiError, NotReadyError
from lmi_vllm.features.adapters_state.reconciler import (
    AdapterReconciler,
    WantedAdapters,
    are_equal,
    as_registered,
    as_shared,
)
from lmi_vllm.features.adapters_state.shared_object import (
    ReplicaReport,
    StateObject,
)
from lmi_vllm.sources.base import InterruptedTransferError, ObjectChangedError, UnreachableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
REPORT_SECONDS: Final = 20.0
# How long a start retries an adapter that cannot be loaded: long enough for a source that fails for
# a moment, short enough that one that fails for good does not keep new servers from readiness.
READY_SECONDS: Final = 15.0
READY_PAUSE_SECONDS: Final = 1.0
READ_SECONDS: Final = 2.0  # that a call waits for what other servers' calls have done
ARRIVE_SECONDS: Final = 20.0  # that a request or a call waits for an adapter to be loaded
WRITE_SECONDS: Final = 5.0  # that a call waits for its change to be written
RECONCILE_SECONDS: Final = 1.0  # that writing waits for adapters to be applied
CONFIRM_SECONDS: Final = 30.0  # less than the minute that proxies wait for an answer
CONFIRM_PAUSE_SECONDS: Final = 0.3
MAX_STORE_CALLS: Final = 4
MAX_CONFLICTS: Final = 20
STORE_ERRORS: Final = (UnreachableError, InterruptedTransferError, DownloadError)


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
        self._state = state
        self._refresh_seconds = refresh_seconds
        self._now = now
        # Not asyncio's own, which loads of adapters share: a store that hangs would fill it.
        self._pool = ThreadPoolExecutor(MAX_STORE_CALLS, "adapters-state")
        self._wanted = WantedAdapters()
        self._registry = registry
        self._sync_lock = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        self._is_closed = False
        self._wake = asyncio.Event()
        self._reconciler = AdapterReconciler(
            registry, drop_seconds, now, self._wake.set, self._wanted
        )
        self._reported: tuple[ReplicaReport, float] | None = None
        self._synced_at = now()

    @property
    def age_seconds(self) -> float:
        """Seconds since the last complete synchronization: read, applied, written, reported."""
        return self._now() - self._synced_at

    @property
    def missing(self) -> Mapping[str, str]:
        """The reason by name for each adapter that this server does not have as it is shared."""
        return self._reconciler.missing

    async def begin(self) -> None:
        """Wait until every shared adapter is registered, however long the store is unreachable.

        An adapter that cannot be loaded is retried for `READY_SECONDS`, then logged and left out.

        Raises:
            ModelSourceError: the object is not ours, or the store has no conditional writes.
            DownloadError: the store refuses.
        """
        until: float | None = None
        is_checked = False
        while True:
            try:
                if not is_checked:
                    await self._in_pool(self._state.check_conditions)
                is_checked = True
                has_work = await self.sync()
            except (UnreachableError, InterruptedTransferError) as error:
                logger.warning(
                    "%s cannot be read, so this server waits: %s", self._state.place, error
                )
                await asyncio.sleep(min(self._refresh_seconds, READY_PAUSE_SECONDS))
                continue
            if has_work:  # calls go on while adapters are loaded: read again
                continue
            until = self._now() + READY_SECONDS if until is None else until
            if self.missing and self._now() < until:
                await asyncio.sleep(READY_PAUSE_SECONDS)
                continue
            for name, reason in self.missing.items():
                logger.error("this server is ready without adapter %s: %s", name, reason)
            return

    async def run(self) -> None:
        """Synchronize periodically until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._refresh_seconds)
            self._wake.clear()
            await self._sync_if_possible()

    def check(self, name: str) -> None:
        """Return when the current task may change `name`, whose lock it holds.

        Raises:
            OutdatedError: it is the reconciler's, and a call was faster.
        """
        self._reconciler.check(name)

    def note(self, name: str, before: Adapter | None) -> None:
        """Note a change that a call makes: from now on it is what is wanted, here and elsewhere."""
        if self._reconciler.is_applying:
            self._reconciler.on_applied()
            return
        if before is not None and before.is_from_store:
            self._note_found(name, before)
            return
        after = self._reconciler.registered(name)
        is_shared = not are_equal(as_shared(before), after)  # not one that was found on demand
        if is_shared and not self._reconciler.is_as_wanted(name):
            self._wanted.pending[name] = after

    def _note_found(self, name: str, before: Adapter) -> None:
        """Note a call on an adapter of the store: from now on it counts as one of a call."""
        after = self._registry.describe(name) if name in self._registry else None
        if after is None or not after.is_from_store:
            self._wanted.pending[name] = as_shared(after)
        elif not are_equal(as_registered(before), as_registered(after)):
            self._wanted.pending[name] = as_registered(after)

    def is_removed(self, name: str) -> bool:
        """Whether a call has removed the name, here or on another replica."""
        return self._wanted.is_removed(name)

    async def refresh(self, name: str) -> None:
        """Have this adapter as calls on other servers have left it, where the store answers."""
        await asyncio.wait({self._next_sync()}, timeout=READ_SECONDS)
        await self._reconciler.wait(name, ARRIVE_SECONDS)

    async def arrive(self, name: str) -> None:
        """Wait for an adapter of this name that a call on another server has registered.

        Raises:
            NotReadyError: it cannot be loaded here now; another server may have it.
        """
        if self._reconciler.is_served(name):
            return
        await self._reconciler.wait(name, ARRIVE_SECONDS)
        if not self._reconciler.is_served(name):
            raise NotReadyError(
                f"The adapter {name} is registered, and this server has not loaded it yet: it is "
                "shared (option.adapters_state)"
            )

    async def changed(self, name: str) -> None:
        """Write a change that a call has made here; one that the reconciler made is not written."""
        if self._reconciler.is_applying or name not in self._wanted.pending:
            return
        await asyncio.wait({self._next_sync()}, timeout=WRITE_SECONDS)

    async def confirm(self, name: str) -> dict[str, str]:
        """Wait until every live replica has the change, at most `CONFIRM_SECONDS`.

        Returns the reason by name for each replica that lacks it; under the object's URL where the
        object itself is unreachable. A replica is live that reported within the last minute.
        """
        until = self._now() + CONFIRM_SECONDS
        lacking = {self._state.place: "cannot be written now: the others will have it afterwards"}
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_SECONDS):  # also where the store hangs
                while name in self._wanted.pending and self._now() < until:
                    await asyncio.sleep(CONFIRM_PAUSE_SECONDS)
                    await asyncio.wait({self._next_sync()})
                if name in self._wanted.pending:
                    return lacking
                generation = self._wanted.shared.generation
                lacking = {self._state.place: "cannot be read now"}
                while lacking := await self._lacking(name, generation):
                    if self._now() > until:
                        break
                    await asyncio.sleep(CONFIRM_PAUSE_SECONDS)
        return lacking

    async def close(self) -> None:
        """Write what is pending, and delete the report of this replica; begin nothing more."""
        self._is_closed = True
        self._reconciler.close()
        with suppress(*STORE_ERRORS, LmiError, TimeoutError):
            async with asyncio.timeout(WRITE_SECONDS), self._sync_lock:
                await self._write_pending()
        with suppress(*STORE_ERRORS, TimeoutError):
            await asyncio.wait_for(self._in_pool(self._state.leave), WRITE_SECONDS)

    async def sync(self, reconcile_seconds: float = RECONCILE_SECONDS) -> bool:
        """Read the object, reconcile, write pending changes, report.

        Returns whether there was an adapter to load, change or unload; what is written waits for
        them at most `reconcile_seconds`.

        Raises:
            LmiError, UnreachableError, InterruptedTransferError: the store's.
        """
        async with self._sync_lock:
            self._next = None  # calls from now on need one that reads later
            if self._is_closed:
                return False
            await self._read()
            tasks = self._reconciler.reconcile()
            if tasks:
                await asyncio.wait(tasks, timeout=reconcile_seconds)
            await self._write_pending()
            await self._report()
            self._synced_at = self._now()
            return bool(tasks)

    def _next_sync(self) -> asyncio.Task[None]:
        """Return a synchronization that has not begun: one for all calls, however many wait."""
        if self._next is None:
            self._next = asyncio.create_task(self._sync_if_possible())
        return self._next

    async def _sync_if_possible(self) -> None:
        try:
            await self.sync()
        except (*STORE_ERRORS, LmiError) as error:
            logger.error(
                "%s is unreachable; the known adapters are served: %s", self._state.place, error
            )
        except Exception:  # refreshing goes on, whatever it was
            logger.exception("%s cannot be read or written", self._state.place)

    def _in_pool(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def _read(self) -> None:
        was_known = self._state.is_known
        new = await self._in_pool(self._state.read)
        if new is not None:
            self._wanted.shared = new
        elif was_known and not self._state.is_known:
            logger.error("%s is gone: the adapters stay as they are", self._state.place)
            self._wanted.pending = {**self._wanted.shared.adapters, **self._wanted.pending}

    async def _lacking(self, name: str, generation: int) -> dict[str, str]:
        """Return what `confirm` does, at this moment."""
        try:
            others = await self._in_pool(self._state.live_reports)
        except STORE_ERRORS:
            return {self._state.place: "cannot be read now"}
        return {
            replica: report.missing.get(name, "has not read the change")
            for replica, report in sorted(others.items())
            if report.generation < generation or name in report.missing
        }

    async def _write_pending(self) -> None:
        for _ in range(MAX_CONFLICTS):
            if not self._wanted.pending:
                return
            changes = dict(self._wanted.pending)
            has_store = self._registry.hooks.find is not None
            new = self._wanted.shared.with_changes(changes, is_removal_kept=has_store)
            try:
                await self._in_pool(self._state.write, new)
            except ObjectChangedError:
                await self._read()
                self._reconciler.reconcile()
                continue
            self._wanted.written(changes, new)
        raise UnreachableError(f"{MAX_CONFLICTS} writes in a row were lost to other replicas")

    async def _report(self) -> None:
        """Write the report if it has changed, or is due again; none once this server ends."""
        if self._is_closed:
            return
        report = ReplicaReport(self._wanted.shared.generation, self.missing)
        if self._reported is not None:
            before, at = self._reported
            if before == report and self._now() < at + REPORT_SECONDS:
                return
        await self._in_pool(self._state.report, report)
        self._reported = report, self._now()
