"""The cache of adapters from the store: which are registered, and the disk that they use."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterCapacityError, ResourceNotFoundError
from lmi_vllm.extras.adapter_store.files import SEPARATOR, AdapterFiles
from lmi_vllm.extras.adapter_store.settings import CachePolicy
from lmi_vllm.extras.adapter_store.stores import StoredAdapter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CachedAdapter:
    """An adapter of the store that is registered."""

    version: str
    key: str  # of its files
    checked: float  # when the store was asked last


class AdapterCache:
    """Cached adapters by name, evicted by least recent use.

    One that `is_busy` names is being brought in or renewed, and stays.
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
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Lock()

    def touch(self, kept: CachedAdapter) -> None:
        """Make it the most recently used."""
        self._files.touch(kept.key)

    async def wait_evicted(self, name: str) -> None:
        """Wait for a running eviction of that name."""
        if (leaving := self._leaving.get(name)) is not None:
            await asyncio.wait({leaving})

    def close(self) -> None:
        """End all work."""
        for task in self._leaving.values():
            task.cancel()

    async def make_room(self, key: str, found: StoredAdapter) -> None:
        """Evict unused adapters until the files have room.

        Raises:
            DownloadError: it is larger than adapters may be.
            AdapterCapacityError: everything that is kept is in use.
        """
        self._policy.limits.check(found.name, found.files, found.total_bytes)
        self._files.limits.check(found.name, 0, found.total_bytes)
        async with self._room:
            while not self._files.has_room(found.total_bytes - self._files.size(key)):
                victim = next(
                    (one for one in self._files if one != key and self._is_evictable(one)), None
                )
                if victim is None:
                    raise AdapterCapacityError(
                        f"No room for adapter {found.name}: all that option.adapter_store_cache_gb "
                        "allows is in use"
                    )
                await self._evict(victim)
            self._files.take(key, found.total_bytes)

    async def drop(self, name: str, kept: CachedAdapter) -> None:
        """Unregister the adapter once its requests have ended, then delete its files."""
        with suppress(ResourceNotFoundError):
            await self._registry.unregister(name, self._policy.drop_seconds(), only_found=True)
        self.by_name.pop(name, None)
        await self.forget(kept.key)

    async def forget(self, key: str) -> None:
        """Delete files, and count them no more."""
        await asyncio.to_thread(self._files.delete, key)
        self._files.forget(key)

    def _is_evictable(self, key: str) -> bool:
        name = key.partition(SEPARATOR)[0]
        if self._is_busy(name) or name in self._leaving:
            return False
        kept = self.by_name.get(name)
        if kept is None or kept.key != key or name not in self._registry:
            return True
        is_pinned = self._registry.describe(name).pin
        return not is_pinned and not self._registry.is_used(name)

    async def _evict(self, key: str) -> None:
        name = key.partition(SEPARATOR)[0]
        kept = self.by_name.get(name)
        if kept is None or kept.key != key:
            await self.forget(key)
            return
        logger.info("adapter %s makes room for another", name)
        leaving = self._leaving[name] = asyncio.create_task(self.drop(name, kept))
        leaving.add_done_callback(lambda _: self._leaving.pop(name))
        await asyncio.wait({leaving})
        leaving.result()
