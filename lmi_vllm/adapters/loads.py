"""Loaded adapters, their reference counts, and the locks that guard changes."""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from lmi_vllm.adapters import source_threads
from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.source_threads import SourceThreads
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.hooks import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

FIRST_ENGINE_ID: Final = 1000  # the engine uses the ids below itself

P = ParamSpec("P")
R = TypeVar("R")
Resolve = Callable[[str], str]
Release = Callable[[str], None]  # of a source that was resolved
LoadCode = Callable[[str, str, Mapping[str, str]], Awaitable[Hooks]]  # name, path, options


def keep_copy(_src: str) -> None:
    """Keep what was fetched for an adapter."""


async def no_code(_name: str, _path: str, _options: Mapping[str, str]) -> Hooks:
    """Load no code of adapters."""
    return NO_HOOKS


class ReferenceCount:
    """The reference count of one load of an adapter: the requests that use it."""

    def __init__(self) -> None:
        self._count = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Count one more reference while the body runs."""
        self._count += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._unused.set()

    @property
    def is_held(self) -> bool:
        """Whether a request uses the load."""
        return self._count > 0

    async def wait_unused(self, timeout_seconds: float) -> None:
        """Wait until the count is 0, at most for the given time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._unused.wait(), timeout_seconds)


class AdapterLoads:
    """Loads adapters into the engine, one call at a time; ids of loads are never reused.

    `resolve` turns a source into a local directory, or raises AdapterRefusedError. So does
    `load_code` for the adapter's hooks. `release` drops what `resolve` has fetched.
    """

    def __init__(
        self, engine: Engine, resolve: Resolve, load_code: LoadCode, release: Release = keep_copy
    ) -> None:
        self.engine = engine
        self._release = release
        self._sources = SourceThreads(resolve, release)
        self._load_code = load_code
        self._lock = asyncio.Lock()
        self._ids = itertools.count(FIRST_ENGINE_ID)
        self._uses: dict[int, ReferenceCount] = {}  # by the engine's id of a load

    async def prepare(self, adapter: Adapter, replaced: AdapterRef | None = None) -> Adapter:
        """Return the adapter with its files, its hooks and, if preloaded, its weights."""
        path = adapter.path if adapter.is_from_store else await self._resolved(adapter)
        adapter = replace(adapter, path=path)
        try:
            # Before the files are read: a change meanwhile counts as one that comes later.
            adapter = replace(adapter, version=await asyncio.to_thread(version_of, path))
            hooks = await self._load_code(adapter.name, path, adapter.options)
            adapter = replace(adapter, hooks=hooks)
            return await self.load(adapter, replaced) if adapter.preload else adapter
        except BaseException:
            await self.forget_files(adapter)
            raise

    async def has_new_files(self, adapter: Adapter) -> bool:
        """Whether the source, fetched again, has other files than those that were read.

        A store that finds adapters on demand compares them itself.

        Raises:
            AdapterRefusedError: the source is not usable any more.
        """
        if adapter.is_from_store:
            return False
        path = await self._resolved(adapter)
        try:
            return await asyncio.to_thread(version_of, path) != adapter.version
        finally:
            await asyncio.to_thread(self._release, adapter.src)

    async def forget_files(self, adapter: Adapter) -> None:
        """Forget the adapter's code, and drop what was fetched for it alone."""
        adapter.hooks.forget()
        if adapter.path and not adapter.is_from_store:
            await asyncio.to_thread(self._release, adapter.src)

    async def load(self, adapter: Adapter, replaced: AdapterRef | None = None) -> Adapter:
        """Load the adapter under a new id, unless it is loaded; pin it if asked; return it.

        If it is pinned, it gets the slot of the pinned load that is `replaced`.
        """
        async with self._lock:
            old = 0 if replaced is None else replaced.engine_id
            if adapter.ref is None:
                ref = AdapterRef(adapter.name, adapter.path, next(self._ids), adapter.pin, old)
            else:
                ref = replace(adapter.ref, pinned=adapter.pin)
            await self.engine.load_adapter(ref)
        return replace(adapter, ref=replace(ref, replaces=0))

    def hold(self, ref: AdapterRef) -> contextlib.AbstractContextManager[None]:
        """Hold a reference to this load while the body runs."""
        return self._uses.setdefault(ref.engine_id, ReferenceCount()).hold()

    def is_held(self, ref: AdapterRef | None) -> bool:
        """Whether a request uses this load, here or in another client of the engine."""
        if ref is None:
            return False
        uses, active = self._uses.get(ref.engine_id), self.engine.active_adapters
        return (uses is not None and uses.is_held) or ref.name in (*active.running, *active.waiting)

    async def unpin(self, ref: AdapterRef | None) -> None:
        """Leave the slot of a pinned load to others: requests that use it need one like theirs."""
        if ref is not None and ref.pinned:
            async with self._lock:
                await self.engine.load_adapter(replace(ref, pinned=False))

    async def unload(self, ref: AdapterRef | None, timeout_seconds: float) -> None:
        """Drop the weights of a load once no request uses it, or after a time limit."""
        if ref is None:
            return
        if (uses := self._uses.get(ref.engine_id)) is not None:
            await uses.wait_unused(timeout_seconds)
        async with self._lock:
            await self.engine.unload_adapter(ref)
        self.forget(ref)

    def forget(self, ref: AdapterRef) -> None:
        """Drop the reference count of a load that was unloaded."""
        self._uses.pop(ref.engine_id, None)

    async def move_to(self, engine: Engine) -> int:
        """Load into `engine` from now on; its ids are above the one that is returned."""
        async with self._lock:
            self.engine = engine
            return next(self._ids)

    async def _resolved(self, adapter: Adapter) -> str:
        shown = f"Adapter {adapter.name}"
        try:
            return await self._sources.resolve(adapter.src)
        except AdapterRefusedError as error:
            raise type(error)(f"{shown}: {error.text}") from error
        except TimeoutError as error:
            reason = f"its source did not answer within {source_threads.RESOLVE_SECONDS:g} s"
            raise AdapterRefusedError(f"{shown}: {str(error) or reason}") from error


class KeyedLock:
    """One lock for each key; it exists only while it is held or waited for."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._locks)

    @contextlib.asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of `key` while the body runs; waiters are served in order."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            yield


class HasShieldedCalls(Protocol):
    """A base class whose `shielded` methods run in tasks of their own."""

    changes: set[asyncio.Task[Any]]  # tasks that have not ended


S = TypeVar("S", bound=HasShieldedCalls)


def shielded(
    method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Run a method to its end, even if its caller is cancelled (`asyncio.shield`)."""

    @functools.wraps(method)
    async def call(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        task = asyncio.create_task(method(owner, *args, **kwargs))
        owner.changes.add(task)
        task.add_done_callback(owner.changes.discard)
        task.add_done_callback(_log_refusal)
        return await asyncio.shield(task)

    return call


def _log_refusal(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("adapter call refused: %s", error)


_CODE_FILE: Final = "model.py"  # code may import and read what lies in folders, too
_COMPILED: Final = "__pycache__"  # Python's own, written by an import


def version_of(path: str) -> str:
    """Return a digest of the folder and of each file's name, number, size and times."""
    folder = Path(path)
    has_code = (folder / _CODE_FILE).exists()
    found = [str(folder)]
    for file in sorted(folder.rglob("*") if has_code else folder.glob("*")):
        if _COMPILED in file.parts:
            continue
        try:
            status = file.stat()
        except OSError:  # it has gone, or is a link to nothing
            continue
        if not file.is_dir():
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found.append(f"{file}\0{status.st_ino}\0{status.st_size}\0{times}")
    return hashlib.sha256("\0\0".join(found).encode("utf-8", "surrogateescape")).hexdigest()
