"""Adapters on demand: looked up at the first request, cached while used, refreshed."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import (
    AdapterCapacityError,
    AdapterConflictError,
    AdapterRefusedError,
    DownloadError,
    LmiError,
    ManagementError,
    NoAdapterSlotError,
    NotReadyError,
    RequestError,
)
from lmi_vllm.features.adapter_store.cache import AdapterCache, CachedAdapter
from lmi_vllm.features.adapter_store.files import SEPARATOR, AdapterFiles
from lmi_vllm.features.adapter_store.negative_cache import NAME, NegativeCache
from lmi_vllm.features.adapter_store.settings import CachePolicy
from lmi_vllm.features.adapter_store.stores import AdapterStore, StoredAdapter
from lmi_vllm.features.metrics import ADAPTER_LOOKUPS
from lmi_vllm.hooks import NO_HOOKS
from lmi_vllm.sources.base import InterruptedTransferError, UnreachableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
RENEW_WAIT_SECONDS: Final = 2.0  # then the request goes on with the adapter that is loaded
FIND_SECONDS: Final = 120.0  # that a request waits for look-up and fetch, which go on without it
LOOKUP_SECONDS: Final = 20.0  # that the store has to answer, the wait for a turn included
MAX_LOOKUPS: Final = 8
# Look-ups and loads that run or wait: they go on when their clients disconnect, so that neither the
# queue of requests nor its slots bound them.
MAX_WAITING: Final = 256
MAX_FETCHES: Final = 4
STORE_ERRORS: Final = (UnreachableError, InterruptedTransferError, DownloadError)


class OnDemandAdapters:
    """Registers an adapter of the store once a request names it; its `find` is the registry's.

    Each name has at most one task at a time, which outlives the request that started it.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        store: AdapterStore,
        files: AdapterFiles,
        policy: CachePolicy,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._store = store
        self._files = files
        self._policy = policy
        self._now = now
        self._negative = NegativeCache(now)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cache = AdapterCache(registry, files, policy, self._tasks.__contains__)
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "adapter-lookup")
        self._fetches = ThreadPoolExecutor(MAX_FETCHES, "adapter-fetch")

    async def find(self, name: str) -> bool:
        """Return whether there is such an adapter, registered by now; a loaded one may be renewed.

        Raises:
            RequestError: the store has it, and it cannot be served.
            NotReadyError: the store does not answer, or takes longer than `FIND_SECONDS`.
        """
        if name not in self._registry:
            return NAME.fullmatch(name) is not None and await self._find_new(name)
        cached = self._cache.by_name.get(name)
        if cached is not None and self._registry.is_from_store(name):
            self._cache.touch(cached)
            if (
                self._now() >= cached.checked + self._policy.refresh_seconds
                and name not in self._tasks
            ):
                cached.checked = self._now()  # so that only one request waits for the renewal
                await asyncio.wait({self._begin(name, self._renew)}, timeout=RENEW_WAIT_SECONDS)
        return True

    def close(self) -> None:
        """Cancel the running tasks."""
        for task in self._tasks.values():
            task.cancel()
        self._cache.close()
        for pool in (self._lookups, self._fetches):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _find_new(self, name: str) -> bool:
        await self._cache.wait_evicted(name)
        if name not in self._tasks and (cached := self._cache.by_name.pop(name, None)) is not None:
            if self._registry.hooks.sharing is None:  # else the replicas agree on what is removed
                self._negative.remove(name)
            await self._cache.forget(cached.key)
        if self._is_absent(name):
            return False
        if name not in self._tasks and len(self._tasks) >= MAX_WAITING:
            raise NotReadyError("too many adapters are looked up already", retry_after_seconds=1)
        task = self._tasks.get(name) or self._begin(name, self._load)
        await asyncio.wait({task}, timeout=FIND_SECONDS)
        if not task.done():
            raise NotReadyError(f"The adapter {name} is still being fetched from the store")
        task.result()
        return name in self._registry or not self._is_absent(name)

    def _begin(
        self, name: str, begin: Callable[[str], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        task = self._tasks[name] = asyncio.create_task(begin(name))
        task.add_done_callback(lambda _: self._tasks.pop(name))
        task.add_done_callback(_retrieve_exception)
        return task

    async def _load(self, name: str) -> None:
        """Register the adapter, or remember why it cannot be."""
        version = ""
        try:
            found = await self._look_up(name)
            if found is None:
                self._negative.miss(name)
                return
            self._check_refused(found)
            version = found.version
            await self._register(found)
        except AdapterCapacityError as error:  # not remembered: room may be freed soon
            raise NoAdapterSlotError(error.text) from error
        except (ManagementError, DownloadError) as error:
            text = error.text
            logger.warning("adapter %s of the store cannot be served: %s", name, text)
            refused = version if isinstance(error, ManagementError) else ""
            self._negative.refuse(name, RequestError, text, refused)
            raise RequestError(text) from error

    async def _look_up(self, name: str) -> StoredAdapter | None:
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await _run_in(self._lookups, self._store.look_up, name)
        except (*STORE_ERRORS, OSError) as error:  # of a folder, or the time is up
            ADAPTER_LOOKUPS.labels("failed").inc()
            raise self._failure(
                name, error, may_pass=not isinstance(error, DownloadError)
            ) from error
        ADAPTER_LOOKUPS.labels("missing" if found is None else "found").inc()
        return found

    def _failure(self, name: str, error: Exception, *, may_pass: bool) -> LmiError:
        """Return the error that requests get when the store failed; the log has the reason.

        A failure that may pass is 503, so that a client retries: another replica may have it.
        """
        reason = "no answer in time" if isinstance(error, TimeoutError) else error
        logger.error("adapter %s cannot be fetched from the store: %s", name, reason)
        failure = NotReadyError if may_pass else RequestError
        text = f"The adapter {name} cannot be had from the store of adapters now"
        if name not in self._registry:
            self._negative.fail(name, failure, text, for_long=not may_pass)
        return failure(text)

    def _check_refused(self, found: StoredAdapter) -> None:
        """Raise `AdapterRefusedError` where this version was refused: it is not fetched again."""
        if reason := self._negative.refusal(found.name, found.version):
            raise AdapterRefusedError(reason)

    async def _register(self, found: StoredAdapter) -> None:
        key, path = await self._fetched(found)
        adapter = Adapter(found.name, found.src, path=path, is_from_store=True)
        with suppress(AdapterConflictError):  # a management call registered the name meanwhile
            await self._registry.register(adapter)
            self._negative.forget(found.name)
            cached = CachedAdapter(found.version, key, self._now())
            self._cache.by_name[found.name] = cached
            if self._is_removed(found.name):  # meanwhile, on another replica
                await self._cache.drop(found.name, cached)

    async def _fetched(self, found: StoredAdapter) -> tuple[str, str]:
        """Return the key of the adapter's files and their directory, once there is room for them.

        Raises:
            NotReadyError: every cached adapter is in use.
            LmiError: it cannot be fetched, or is not a valid adapter.
        """
        key = f"{found.name}{SEPARATOR}{found.version}"
        await self._cache.make_room(key, found)
        try:
            path = await _run_in(self._fetches, self._store.fetch, found, self._files.path(key))
        except BaseException as error:
            await self._cache.forget(key)
            if isinstance(error, (*STORE_ERRORS, OSError)):
                raise self._failure(found.name, error, may_pass=True) from error
            raise
        return key, path

    async def _renew(self, name: str) -> None:
        """Load the store's present version under a new id; on any failure the old one stays."""
        cached, found = self._cache.by_name[name], None
        try:
            found = await self._look_up(name)
            await asyncio.to_thread(self._files.mark_used, cached.key)
            if found is None:
                logger.info("adapter %s is gone from the store", name)
                self._negative.miss(name)
                await self._cache.drop(name, cached)
            elif found.version != cached.version:
                self._check_refused(found)
                await self._replace(found, cached)
        except (NotReadyError, RequestError):
            return  # logged
        except (ManagementError, DownloadError) as error:
            text, version = error.text, "" if found is None else found.version
            logger.warning("adapter %s has changed and cannot be loaded: %s", name, text)
            if version and not isinstance(error, (DownloadError, AdapterCapacityError)):
                self._negative.refuse(name, RequestError, text, version)

    async def _replace(self, found: StoredAdapter, cached: CachedAdapter) -> None:
        key, path = await self._fetched(found)
        try:
            current = self._registry.describe(found.name)
            new = replace(current, path=path, ref=None, hooks=NO_HOOKS, is_from_store=True)
            self._cache.by_name[found.name] = replace(cached, version=found.version, key=key)
            await self._registry.replace(new, self._policy.drop_seconds())
        except BaseException:
            if not _is_served(
                self._registry, found.name, path
            ):  # else only the old load did not go
                self._cache.by_name[found.name] = cached
                await self._cache.forget(key)
            raise
        logger.info("adapter %s has changed in the store: the new one is served", found.name)
        await self._cache.forget(cached.key)

    def _is_removed(self, name: str) -> bool:
        sharing = self._registry.hooks.sharing
        return sharing is not None and sharing.is_removed(name)

    def _is_absent(self, name: str) -> bool:
        """Whether it is removed, or known to be missing; raises why it was refused."""
        return self._is_removed(name) or self._negative.is_absent(name)


def _is_served(registry: AdapterRegistry, name: str, path: str) -> bool:
    return name in registry and registry.describe(name).path == path


async def _run_in(pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, else asyncio logs it: the requests that waited may be gone."""
    if not task.cancelled():
        task.exception()
