"""Adapters that outlive a server: restored before it is ready, persisted until it ends."""

import asyncio
import contextlib
import functools
import logging
import re
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.errors import UnknownAdapterError
from lmi_vllm.features.adapters_state.file import AdapterStateFile
from lmi_vllm.features.adapters_state.settings import AdaptersStateSettings
from lmi_vllm.features.adapters_state.shared_object import StateObject
from lmi_vllm.features.adapters_state.sharing import ReplicaAdapters
from lmi_vllm.features.metrics import STATE_AGE_SECONDS, STATE_MISSING
from lmi_vllm.server.context import ModelContext
from lmi_vllm.sources.local import is_url, without_file_scheme

logger = logging.getLogger(__name__)

PING_DETAIL: Final = "adapters_state"  # in the body of /ping and /ready
MAX_MISSED_PERIODS: Final = 3  # without a synchronization, before /ping says so
WATCH_SECONDS: Final = 1.0


class Replica:
    """Persists the adapters of a model of this server, where its settings ask for it."""

    def __init__(self, model: ModelContext) -> None:
        self._model = model
        self._asked = model.settings.feature(AdaptersStateSettings)
        self._tasks: list[asyncio.Task[None]] = []
        self._shared: ReplicaAdapters | None = None

    def keep(self, registry: AdapterRegistry, sources: AdapterSources | None) -> AdapterHooks:
        """Return what keeps and restores the registry's adapters; in the first process for all.

        It begins with ModelSourceError where the file or object cannot be read.
        """
        place = self._asked.adapters_state or ""
        store = self._model.sources.store_of(place) if place else None
        if sources is None:  # a find of the adapter store asks the first process, too
            find = functools.partial(_ask_first_process, registry) if store is not None else None
            return AdapterHooks(find)
        if store is not None:
            folder, _, name = place.rpartition("/")
            objects = store.make_store(f"{folder}/", self._model.environ)
            return self._share(registry, StateObject(objects, name, replica_name()))
        if not place or is_url(place):
            return AdapterHooks()
        state_file = AdapterStateFile(Path(without_file_scheme(place)))
        restore = functools.partial(state_file.restore, registry)
        keep, forget = state_file.keep, state_file.forget
        return AdapterHooks(on_change=keep, forget=forget, begin=(restore,))

    def _share(self, registry: AdapterRegistry, state: StateObject) -> AdapterHooks:
        seconds, service = self._asked.adapters_state_refresh_seconds, self._model.service
        shared = ReplicaAdapters(registry, state, seconds, lambda: service.profile.predict_timeout)
        late_seconds = MAX_MISSED_PERIODS * seconds + WATCH_SECONDS

        async def begin() -> None:
            self._shared = shared
            self._tasks = [asyncio.create_task(self._watch(shared, late_seconds))]
            await shared.begin()
            logger.info("adapters are shared over %s, as %s", state.place, state.replica)
            self._tasks.append(asyncio.create_task(shared.run()))

        return AdapterHooks(sharing=shared, begin=(begin,))

    async def close(self) -> None:
        """Stop synchronizing the adapters of a model."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._model.service.lifecycle.ping_details.pop(PING_DETAIL, None)
        if self._shared is not None:
            await self._shared.close()
            self._shared = None

    async def _watch(self, shared: ReplicaAdapters, late_seconds: float) -> None:
        """Update the metrics, and the detail in `/ping` of a state that is unreachable."""
        notes = self._model.service.lifecycle.ping_details
        while True:
            age = shared.age_seconds
            STATE_AGE_SECONDS.set(age)
            STATE_MISSING.set(len(shared.missing))
            notes.pop(PING_DETAIL, None)
            if age > late_seconds:
                notes[PING_DETAIL] = f"unreachable for {age:.0f} s: the known adapters are served"
            await asyncio.sleep(WATCH_SECONDS)


async def _ask_first_process(registry: AdapterRegistry, name: str) -> bool:
    """Return whether there is such an adapter, also one that the first process is about to load."""
    if name not in registry:
        try:
            await registry.load_on_first_use(name)
        except UnknownAdapterError:
            return False
    return True


def replica_name() -> str:
    """Return a unique name of this process that begins with the name of its host."""
    return f"{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}-{uuid.uuid4().hex[:8]}"


@contextlib.asynccontextmanager
async def keeping_adapters(model: ModelContext) -> AsyncIterator[None]:
    """Persist adapters as the settings of the model ask for it, while the body runs."""
    replica = Replica(model)
    model.on_adapters.append(replica.keep)
    yield
    await replica.close()
