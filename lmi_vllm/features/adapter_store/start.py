"""Adapters on demand in a server: the store of its settings behind the registry of its model."""

import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import Final

from lmi_vllm.adapters.hooks import AdapterHooks, Find
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.errors import UnknownAdapterError
from lmi_vllm.features.adapter_store.files import locked_files
from lmi_vllm.features.adapter_store.on_demand import OnDemandAdapters
from lmi_vllm.features.adapter_store.settings import GIB, AdapterStoreSettings, CachePolicy
from lmi_vllm.features.adapter_store.stores import ObjectFolders, open_adapter_store
from lmi_vllm.features.metrics import COLD_ADAPTER_SECONDS
from lmi_vllm.server.context import ModelContext
from lmi_vllm.telemetry.records import RequestSummary, current_record

logger = logging.getLogger(__name__)

MAX_COLD_REQUESTS: Final = 10_000  # that are remembered at once, each until it ends


class ColdRequests:
    """The requests that had to wait for their adapter, until each has ended."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def note(self) -> None:
        """Remember that the current request has had to wait."""
        record = current_record()
        if record is not None and len(self._ids) < MAX_COLD_REQUESTS:
            self._ids.add(record.request_id)

    def noting(self, registry: AdapterRegistry, find: Find) -> Find:
        """Return `find`, which notes the requests for adapters that were not here."""

        async def noted(name: str) -> bool:
            is_new = name not in registry
            is_known = await find(name)
            if is_new and is_known:
                self.note()
            return is_known

        return noted

    def observe(self, summary: RequestSummary) -> None:
        """Observe the time to first token of a request that had to wait."""
        if summary.request_id in self._ids:
            self._ids.discard(summary.request_id)
            if summary.first_token_seconds is not None:
                COLD_ADAPTER_SECONDS.observe(summary.first_token_seconds)


class ForwardedFind:
    """`find` in a further front-end process: it forwards unknown names to the first process."""

    def __init__(self, registry: AdapterRegistry, cold: ColdRequests) -> None:
        self._registry = registry
        self._cold = cold

    async def __call__(self, name: str) -> bool:
        """Ask for an adapter that is not known here, or that came from the store.

        Also by a name that no store has: a call on another server may have registered it.
        """
        is_new = name not in self._registry
        if is_new or self._registry.is_from_store(name):
            try:
                await self._registry.load_on_first_use(name)
            except UnknownAdapterError:
                return False
            if is_new:
                self._cold.note()
        return True


def _look_at_place(store: ObjectFolders, location: str) -> None:
    """Warn of a place that is misspelt, forbidden or still empty, before a request finds out."""
    if fault := store.fault_of_place():
        logger.warning(
            "option.adapter_store=%s: %s: until that changes, requests for its adapters fail",
            location, mask_urls(fault),
        )  # fmt: skip


@contextlib.asynccontextmanager
async def finding_adapters(model: ModelContext) -> AsyncIterator[None]:
    """Find adapters of the store that the model's settings name, while the body runs."""
    asked = model.settings.feature(AdapterStoreSettings)
    if not (location := asked.adapter_store):
        yield
        return
    cold, observers = ColdRequests(), model.service.telemetry.observers
    with contextlib.ExitStack() as running:

        def hooks(registry: AdapterRegistry, sources: AdapterSources | None) -> AdapterHooks:
            if sources is None:
                return AdapterHooks(ForwardedFind(registry, cold))
            max_bytes = int(asked.adapter_store_cache_gb * GIB)
            files = running.enter_context(locked_files(location, model.environ, max_bytes))
            seconds = asked.adapter_store_refresh_seconds
            policy = CachePolicy(
                sources.limits, seconds, lambda: model.service.profile.predict_timeout
            )
            store = open_adapter_store(location, sources, model.environ)
            on_demand = OnDemandAdapters(registry, store, files, policy)
            running.callback(on_demand.close)
            logger.info("adapters that no call has registered come from %s", mask_urls(location))
            if isinstance(store, ObjectFolders):  # a silent store does not hold up the start
                look = (store, mask_urls(location))
                threading.Thread(target=_look_at_place, args=look, daemon=True).start()
            return AdapterHooks(cold.noting(registry, on_demand.find))

        model.on_adapters.append(hooks)
        observers.append(cold.observe)
        running.callback(observers.remove, cold.observe)
        yield
