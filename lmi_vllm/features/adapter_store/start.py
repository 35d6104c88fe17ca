"""Adapters on demand in a server: the store of its settings behind the registry of its model."""

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Final

from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.adapters.source import AdapterSources
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import UnknownAdapterError
from lmi_vllm.features.adapter_store.files import locked_files
from lmi_vllm.features.adapter_store.on_demand import OnDemandAdapters
from lmi_vllm.features.adapter_store.settings import GIB, AdapterStoreSettings, CachePolicy
from lmi_vllm.features.adapter_store.stores import open_adapter_store
from lmi_vllm.features.metrics import COLD_ADAPTER_SECONDS
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments
from lmi_vllm.server.context import ServerEvents
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

    def observe(self, summary: RequestSummary) -> None:
        """Observe the time to first token of a request that had to wait."""
        if summary.request_id in self._ids:
            self._ids.discard(summary.request_id)
            if summary.first_token_seconds is not None:
                COLD_ADAPTER_SECONDS.observe(summary.first_token_seconds)


class OnDemandFinder:
    """Lets the registry of each model find adapters in the store of the settings."""

    def __init__(
        self, service: InferenceService, environ: Mapping[str, str], settings: Settings
    ) -> None:
        self.settings = settings.feature(AdapterStoreSettings)
        self.cold = ColdRequests()
        self._service = service
        self._environ = environ
        self._running = contextlib.ExitStack()

    def use_settings(self, settings: Settings, _: EngineArguments) -> None:
        """Use these settings from the next model on."""
        self.settings = settings.feature(AdapterStoreSettings)

    def hooks(self, registry: AdapterRegistry, sources: AdapterSources | None) -> AdapterHooks:
        """Return a `find` for the registry; in a further process it forwards to the first one."""
        self.close()
        if not (location := self.settings.adapter_store):
            return AdapterHooks()
        if sources is None:
            return AdapterHooks(ForwardedFind(registry, self.cold))
        max_bytes = int(self.settings.adapter_store_cache_gb * GIB)
        files = self._running.enter_context(locked_files(location, self._environ, max_bytes))
        on_demand = OnDemandAdapters(
            registry,
            open_adapter_store(location, sources, self._environ),
            files,
            CachePolicy(
                sources.limits,
                self.settings.adapter_store_refresh_seconds,
                lambda: self._service.profile.predict_timeout,
            ),
        )
        self._running.callback(on_demand.close)

        async def find(name: str) -> bool:
            is_new = name not in registry
            is_known = await on_demand.find(name)
            if is_new and is_known:
                self.cold.note()
            return is_known

        logger.info("adapters that no call has registered come from %s", mask_urls(location))
        return AdapterHooks(find)

    def close(self) -> None:
        """Stop looking for adapters of a model, and unlock its files."""
        self._running.close()


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


@contextlib.asynccontextmanager
async def finding_adapters(
    service: InferenceService,
    settings: Settings,
    environ: Mapping[str, str],
    events: ServerEvents,
) -> AsyncIterator[None]:
    """Find adapters as the settings of each model ask for it, while the body runs."""
    finder = OnDemandFinder(service, environ, settings)
    events.on_plan.append(finder.use_settings)
    events.on_adapters.append(finder.hooks)
    service.telemetry.observers.append(finder.cold.observe)
    yield
    finder.close()
