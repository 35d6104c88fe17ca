"""The registry of LoRA adapters: which names exist, what they stand for, who is using them."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    AdapterConflictError,
    AdapterRefusedError,
    BadParameterError,
    ResourceNotFoundError,
    UnknownAdapterError,
)
from lmi_vllm.messages import AdapterRef

FIRST_ENGINE_ID: Final = 1000  # below are ids the engine keeps for itself
Resolve = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A registered adapter: `src` as given, `ref` once loaded; preload and pin as requested."""

    name: str
    src: str
    preload: bool = True
    pin: bool = False
    ref: AdapterRef | None = None


class _Use:
    """How many requests hold one load of an adapter."""

    def __init__(self) -> None:
        self._count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the load from being dropped while the body runs."""
        self._count += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self.idle.set()


class AdapterRegistry:
    """Names -> adapters; calls for one name queue, engine calls run one at a time.

    `resolve` turns a source into a local directory, or raises AdapterRefusedError.
    """

    def __init__(self, engine: Engine, resolve: Resolve, *, is_enabled: bool) -> None:
        self._engine = engine
        self._resolve = resolve
        self.is_enabled = is_enabled
        self._adapters: dict[str, Adapter] = {}
        self._uses: dict[int, _Use] = {}
        self._engine_turn = asyncio.Lock()
        self._name_turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ids = itertools.count(FIRST_ENGINE_ID)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(tuple(self._adapters.values()))

    def describe(self, name: str, alias: str | None = None) -> Adapter:
        """Return the adapter of that name.

        Raises:
            ResourceNotFoundError: there is none.
        """
        adapter = self._adapters.get(name)
        if adapter is None:
            raise ResourceNotFoundError(
                f"The adapter {alias or name} was not found", "NotFoundException"
            )
        return adapter

    async def register(self, adapter: Adapter, alias: str | None = None) -> None:
        """Load (if preloaded) and list a new adapter; on any failure nothing of it stays.

        Raises:
            AdapterConflictError: the name is taken.
            AdapterRefusedError: its source or weights are not usable.
        """
        self._check_enabled()
        _check_flags(adapter)
        async with self._name_turns[adapter.name]:
            if adapter.name in self._adapters:
                raise AdapterConflictError(
                    f"The adapter {alias or adapter.name} already exists. "
                    "Unregister it first to register another one under this name."
                )
            self._adapters[adapter.name] = await self._loaded(adapter)

    async def update(
        self, name: str, wanted: Adapter, timeout_seconds: float, alias: str | None = None
    ) -> None:
        """Change preload and pin of a registered adapter; on failure the old entry stays.

        Raises:
            ResourceNotFoundError: no adapter of that name.
            AdapterRefusedError: the change is not supported.
        """
        self._check_enabled()
        async with self._name_turns[name]:
            current = self.describe(name, alias)
            _check_flags(wanted)
            if wanted.src != current.src:
                raise AdapterRefusedError("Updating adapter path is not supported.")
            if current.pin and not wanted.pin:
                raise AdapterRefusedError(
                    "Unpinning adapter is not supported. Unregister the adapter and register it "
                    "again without pin."
                )
            if wanted == replace(current, ref=None):
                return
            self._adapters[name] = await self._changed(current, wanted, timeout_seconds)

    async def unregister(self, name: str, timeout_seconds: float, alias: str | None = None) -> None:
        """Stop routing to the adapter, let its requests end (bounded), then drop its weights.

        Raises:
            ResourceNotFoundError: no adapter of that name.
        """
        self._check_enabled()
        async with self._name_turns[name]:
            adapter = self.describe(name, alias)
            del self._adapters[name]
            await self._drop(adapter.ref, timeout_seconds)

    @contextlib.asynccontextmanager
    async def lease(
        self, name: str | None, alias: str | None = None
    ) -> AsyncIterator[AdapterRef | None]:
        """Hold the adapter a request named from admission to its last token; None is the base.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
        """
        if not name:
            yield None
            return
        adapter = self._adapters.get(name)
        if adapter is None:
            raise UnknownAdapterError(alias or name)
        if adapter.ref is None:
            adapter = await self._load_on_first_use(name, alias)
        if adapter.ref is None:
            raise UnknownAdapterError(alias or name)
        with self._uses.setdefault(adapter.ref.engine_id, _Use()).hold():
            yield adapter.ref

    async def _load_on_first_use(self, name: str, alias: str | None) -> Adapter:
        async with self._name_turns[name]:
            adapter = self._adapters.get(name)
            if adapter is None:
                raise UnknownAdapterError(alias or name)
            if adapter.ref is None:
                adapter = await self._loaded(replace(adapter, preload=True))
                self._adapters[name] = replace(adapter, preload=False)
            return adapter

    async def _loaded(self, adapter: Adapter) -> Adapter:
        path = await asyncio.to_thread(self._resolve, adapter.src)
        if not adapter.preload:
            return adapter
        ref = AdapterRef(adapter.name, path, next(self._ids), adapter.pin)
        async with self._engine_turn:
            await self._engine.load_adapter(ref)
        return replace(adapter, ref=ref)

    async def _changed(self, current: Adapter, wanted: Adapter, timeout_seconds: float) -> Adapter:
        if not wanted.preload:
            await self._drop(current.ref, timeout_seconds)
            return replace(wanted, ref=None)
        # A fresh load carries the new flags; running requests end on the old one.
        changed = await self._loaded(wanted)
        self._adapters[wanted.name] = changed
        await self._drop(current.ref, timeout_seconds)
        return changed

    async def _drop(self, ref: AdapterRef | None, timeout_seconds: float) -> None:
        if ref is None:
            return
        if (use := self._uses.pop(ref.engine_id, None)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(use.idle.wait(), timeout_seconds)
        async with self._engine_turn:
            await self._engine.unload_adapter(ref)

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise BadParameterError("LoRA is not enabled.")


def _check_flags(adapter: Adapter) -> None:
    if adapter.pin and not adapter.preload:
        raise AdapterRefusedError(
            f"Adapter {adapter.name}: pin=true needs preload=true; it is impossible to pin an "
            "adapter that is not loaded"
        )
