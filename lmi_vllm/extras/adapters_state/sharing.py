"""What calls have one replica do, all replicas do: over one object in S3 that is read often.

A change is carried out here first, then written; another replica's is taken over when it is read.
Of two replicas that change one adapter the one that writes last wins, and no other name is touched.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import DownloadError, LmiError
from lmi_vllm.extras.adapters_state.shared_object import ReplicaReport, Shared, StateObject
from lmi_vllm.extras.adapters_state.taken import TakenAdapters
from lmi_vllm.sources.base import InterruptedTransferError, ObjectChangedError, UnreachableError

logger = logging.getLogger(__name__)

REPORT_SECONDS: Final = 20.0
# That a start waits for an adapter which cannot be had, through some tries: a source that stumbles
# costs a new server none, and one that is broken for good does not keep every new server away.
READY_SECONDS: Final = 15.0
READY_PAUSE_SECONDS: Final = 1.0
WRITE_SECONDS: Final = 5.0  # that a call waits for its change to be written
TAKE_OVER_SECONDS: Final = 1.0  # that writing waits for what is taken over
CONFIRM_SECONDS: Final = 30.0  # less than the minute that proxies wait for an answer
CONFIRM_PAUSE_SECONDS: Final = 0.3
MOST_CONFLICTS: Final = 20
AWAY: Final = (UnreachableError, InterruptedTransferError, DownloadError)


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
        self._shared = Shared()
        self._pending: dict[str, Adapter | None] = {}  # changed here, not written
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._taken = TakenAdapters(registry, drop_seconds, now, self._wake.set)
        self._reported: tuple[ReplicaReport, float] | None = None
        self._synced_at = now()

    @property
    def age_seconds(self) -> float:
        """Seconds since the object was last read, and what was pending written."""
        return self._now() - self._synced_at

    @property
    def missing(self) -> Mapping[str, str]:
        """What this server does not have as it is shared, with the reason."""
        return self._taken.missing({**self._shared.adapters, **self._pending})

    async def begin(self) -> None:
        """Return when everything that is shared is here, however long the store is away.

        An adapter that cannot be had is tried again for `READY_SECONDS`, and then named.

        Raises:
            ModelSourceError: the object is not ours.
            DownloadError: the store refuses.
        """
        until = self._now() + READY_SECONDS
        while True:
            try:
                await self.sync(all_of_it=True)
            except (UnreachableError, InterruptedTransferError) as error:
                logger.warning(
                    "%s cannot be read, so this server waits: %s", self._state.place, error
                )
                await asyncio.sleep(min(self._refresh_seconds, READY_PAUSE_SECONDS))
                until = self._now() + READY_SECONDS
                continue
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

    async def changed(self, name: str) -> None:
        """Write a change that a call has made here; one that was taken over is left alone."""
        if self._taken.is_as_shared(name):
            self._pending.pop(name, None)
            return
        self._pending[name] = self._taken.own(name)
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
        self._taken.close()
        with suppress(*AWAY, TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._state.leave), WRITE_SECONDS)

    async def sync(self, *, all_of_it: bool = False) -> None:
        """Read, take over, write what is pending, report.

        Raises:
            LmiError, UnreachableError, InterruptedTransferError: the store's.
        """
        async with self._turn:
            await self._read()
            tasks = self._taken.take_over(self._shared.adapters, self._pending)
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
                self._taken.take_over(self._shared.adapters, self._pending)
                continue
            self._shared = new
            self._written(changes)
        raise UnreachableError(f"{MOST_CONFLICTS} writes in a row were another's")

    def _written(self, changes: Mapping[str, Adapter | None]) -> None:
        for name, adapter in changes.items():
            self._taken.written(name, adapter)
            if self._pending.get(name) is adapter:
                self._pending.pop(name, None)

    async def _report(self) -> None:
        """Write the report if it has changed, or is due again."""
        report = ReplicaReport(self._shared.generation, self.missing)
        if self._reported is not None:
            before, at = self._reported
            if before == report and self._now() < at + REPORT_SECONDS:
                return
        await asyncio.to_thread(self._state.report, report)
        self._reported = report, self._now()
