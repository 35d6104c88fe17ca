"""The cache of adapters from the store: which are registered, and their files on the disk."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import NotReadyError, ResourceNotFoundError
from lmi_vllm.features.adapter_store.files import SEPARATOR, AdapterFiles
from lmi_vllm.features.adapter_store.settings import CachePolicy
from lmi_vllm.features.adapter_store.stores import StoredAdapter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CachedAdapter:
    """An adapter of the store that is registered."""

    version: str
    key: str  # of its files
    checked: float  # when it was last compared with the store, in seconds of the clock


class AdapterCache:
    """Cached adapters by name, evicted by least recent use.

    An adapter whose name `is_busy` is being loaded or renewed, and is not evicted.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        files: AdapterFiles,
        policy: CachePolicy,
        is_busy: Callable[[str], bool],
    ) -> None:
        self.by_name: dict[str, CachedAdapter] = {}
        self._registry = registry
        self._files = files
        self._policy = policy
        self._is_busy = is_busy
        self._evictions: dict[str, asyncio.Task[None]] = {}
        self._eviction_lock = asyncio.Lock()

    def touch(self, cached: CachedAdapter) -> None:
        """Make it the most recently used."""
        self._files.touch(cached.key)

    async def wait_evicted(self, name: str) -> None:
        """Wait for a running eviction of that name."""
        if (eviction := self._evictions.get(name)) is not None:
            await asyncio.wait({eviction})

    def close(self) -> None:
        """Cancel the running evictions."""
        for task in self._evictions.values():
            task.cancel()

    async def make_room(self, key: str, found: StoredAdapter) -> None:
        """Evict unused adapters until there is room for `found`, and reserve it under `key`.

        Raises:
            DownloadError: it is larger than one adapter, or all of them, may be.
            NotReadyError: every cached adapter is in use.
        """
        self._policy.limits.check(found.name, found.files, found.total_bytes)
        self._files.limits.check(found.name, 0, found.total_bytes)
        async with self._eviction_lock:
            while not self._files.has_room(found.total_bytes - self._files.size(key)):
                victim = next(
                    (one for one in self._files if one != key and self._is_evictable(one)), None
                )
                if victim is None:
                    text = (
                        f"No room for adapter {found.name}: all that option.adapter_store_cache_gb "
                        "allows is in use"
                    )
                    logger.warning(text)
                    raise NotReadyError(text, retry_after_seconds=1)
                await self._evict(victim)
            self._files.add(key, found.total_bytes)

    async def drop(self, name: str, cached: CachedAdapter) -> None:
        """Unregister the adapter once its requests have ended, then delete its files."""
        with suppress(ResourceNotFoundError):
            await self._registry.unregister(name, self._policy.drop_seconds(), only_from_store=True)
        self.by_name.pop(name, None)
        await self.forget(cached.key)

    async def forget(self, key: str) -> None:
        """Delete the files of an adapter, and free what they reserved."""
        await asyncio.to_thread(self._files.delete, key)
        self._files.forget(key)

    def _is_evictable(self, key: str) -> bool:
        name = key.partition(SEPARATOR)[0]
        if self._is_busy(name) or name in self._evictions:
            return False
        cached = self.by_name.get(name)
        if cached is None or cached.key != key or not self._registry.is_from_store(name):
            return True
        is_pinned = self._registry.describe(name).pin
        return not is_pinned and not self._registry.is_used(name)

    async def _evict(self, key: str) -> None:
        name = key.partition(SEPARATOR)[0]
        cached = self.by_name.get(name)
        if cached is None or cached.key != key:
            await self.forget(key)
            return
        logger.info("adapter %s is evicted from the cache", name)
        eviction = self._evictions[name] = asyncio.create_task(self.drop(name, cached))
        eviction.add_done_callback(lambda _: self._evictions.pop(name))
        await asyncio.wait({eviction})
        eviction.result()
