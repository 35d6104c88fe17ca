"""The registry of LoRA adapters: which names exist, what they stand for, who is using them."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from dataclasses import replace
from typing import Any, Final

from lmi_vllm.adapters.entry import Adapter, Lease, check_flags
from lmi_vllm.adapters.turns import Turns, Use
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    AdapterCapacityError,
    AdapterConflictError,
    AdapterRefusedError,
    BadParameterError,
    RequestError,
    ResourceNotFoundError,
    UnknownAdapterError,
)
from lmi_vllm.inference.hooks.functions import NO_HOOKS, Hooks
from lmi_vllm.messages import AdapterRef

__all__ = ["Adapter", "AdapterRegistry", "Lease"]
logger = logging.getLogger(__name__)

FIRST_ENGINE_ID: Final = 1000  # below are ids the engine keeps for itself
Resolve = Callable[[str], str]
LoadCode = Callable[[str, str], Awaitable[Hooks]]  # name, path
Publish = Callable[[Collection["Adapter"], float], Awaitable[None]]  # adapters, seconds


def ignore_change(_: Collection[Adapter]) -> None:
    """Keep nothing: the state of the registry ends with the process."""


async def nobody_else(_adapters: Collection[Adapter], _timeout_seconds: float) -> None:
    """Tell nobody: no other process serves these adapters."""


async def no_code(_name: str, _path: str) -> Hooks:
    """Load no code of adapters."""
    return NO_HOOKS


class AdapterRegistry:
    """Names -> adapters; calls for one name queue, engine calls run one at a time.

    `resolve` turns a source into a local directory, or raises AdapterRefusedError; so does
    `load_code` for the hooks in it. `on_change` gets all adapters after each change. A call that
    was begun is carried out, whether or not its client stays: half a change would leave weights
    behind that nobody can remove. `publish` is awaited after each change of what requests find: it
    returns when no request in any other process uses another load of an adapter, or its time is up.
    """

    def __init__(
        self,
        engine: Engine,
        resolve: Resolve,
        *,
        is_enabled: bool,
        reserved_names: Collection[str] = (),
        load_code: LoadCode = no_code,
        on_change: Callable[[Collection[Adapter]], None] = ignore_change,
    ) -> None:
        self._engine = engine
        self._resolve = resolve
        self.is_enabled = is_enabled
        self._reserved_names = frozenset(reserved_names)
        self._load_code = load_code
        self._on_change = on_change
        self.publish: Publish = nobody_else
        self._adapters: dict[str, Adapter] = {}
        self._uses: dict[int, Use] = {}
        self._engine_turn = asyncio.Lock()
        self._state_turn = asyncio.Lock()
        self._name_turns = Turns()
        self._ids = itertools.count(FIRST_ENGINE_ID)
        self._calls: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Adapter]:
        return iter(tuple(self._adapters.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def check_enabled(self) -> None:
        """Return when adapters may be managed.

        Raises:
            BadParameterError: the engine runs without LoRA.
        """
        if not self.is_enabled:
            raise BadParameterError("LoRA is not enabled.")

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
            AdapterConflictError: the name is taken, or the source of a kind never loaded.
            AdapterRefusedError: its source or weights are not usable.
        """
        self.check_enabled()
        await self._to_its_end(self._register(adapter, alias or adapter.name))

    async def update(
        self, name: str, wanted: Adapter, timeout_seconds: float, alias: str | None = None
    ) -> None:
        """Change preload, pin and options of an adapter; on failure the old entry stays.

        Raises:
            ResourceNotFoundError: no adapter of that name.
            AdapterRefusedError: the change is not supported, or cannot be carried out.
        """
        self.check_enabled()
        self.describe(name, alias)
        await self._to_its_end(self._update(name, wanted, timeout_seconds, alias))

    async def replace(self, adapter: Adapter, timeout_seconds: float) -> None:
        """Put new weights under a registered name; running requests end on the old ones.

        Raises:
            ResourceNotFoundError: no adapter of that name.
            AdapterRefusedError: the new weights cannot be loaded; the old ones stay.
        """
        self.check_enabled()
        await self._to_its_end(self._replace(adapter, timeout_seconds))

    async def unregister(self, name: str, timeout_seconds: float, alias: str | None = None) -> None:
        """Stop routing to the adapter, let its requests end (bounded), then drop its weights.

        Raises:
            ResourceNotFoundError: no adapter of that name.
        """
        self.check_enabled()
        self.describe(name, alias)
        await self._to_its_end(self._unregister(name, timeout_seconds, alias))

    async def move_to(self, engine: Engine) -> None:
        """Load every loaded adapter into a new engine, before it serves; ids are new as well.

        One whose files are gone stays listed, and a request for it says so: the others, and the
        base model, must not wait for it.

        Raises:
            EngineFailureError: the new engine failed, too.
        """
        async with self._engine_turn:
            self._engine = engine
            first_id = next(self._ids)  # what is loaded from here on, is loaded there
        for name in tuple(self._adapters):
            async with self._name_turns.turn(name):
                adapter = self._adapters.get(name)
                ref = None if adapter is None else adapter.ref
                if adapter is not None and ref is not None and ref.engine_id < first_id:
                    self._uses.pop(ref.engine_id, None)
                    self._adapters[name] = await self._moved(replace(adapter, ref=None))

    async def _moved(self, adapter: Adapter) -> Adapter:
        try:
            return await self._loaded(adapter)
        except AdapterRefusedError as error:
            logger.error("adapter %s did NOT come back: %s", adapter.name, error.text)
            return adapter

    @contextlib.asynccontextmanager
    async def lease(self, name: str | None, alias: str | None = None) -> AsyncIterator[Lease]:
        """Hold the adapter a request named from admission to its last token; None is the base.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
            RequestError: it is registered, but cannot be loaded now.
        """
        if not name:
            yield Lease()
            return
        adapter = self._adapters.get(name)
        if adapter is None:
            raise UnknownAdapterError(alias or name)
        if adapter.ref is None:
            adapter = await self._load_on_first_use(name, alias)
        lease = Lease(adapter.ref, adapter.hooks)
        if lease.ref is None:
            raise UnknownAdapterError(alias or name)
        with self._uses.setdefault(lease.ref.engine_id, Use()).hold():
            yield lease

    async def ensure_loaded(self, name: str) -> None:
        """Load a registered adapter for a request of another process.

        Raises:
            UnknownAdapterError: no adapter of that name.
            RequestError: it cannot be loaded now.
        """
        await self._load_on_first_use(name, None)

    async def _register(self, adapter: Adapter, shown: str) -> None:
        async with self._name_turns.turn(adapter.name):
            if adapter.name in self._adapters:
                raise AdapterConflictError(
                    f"The adapter {shown} already exists. "
                    "Unregister it first to register another one under this name."
                )
            if adapter.name in self._reserved_names:
                raise AdapterConflictError(
                    f"The adapter {shown} conflicts with a served base model of that name"
                )
            check_flags(adapter)
            adapter = await self._with_code(replace(adapter, path=await self._resolved(adapter)))
            self._adapters[adapter.name] = (
                await self._loaded_or_forgotten(adapter) if adapter.preload else adapter
            )
            await self._publish()
        await self._changed()

    async def _replace(self, adapter: Adapter, timeout_seconds: float) -> None:
        async with self._name_turns.turn(adapter.name):
            current = self.describe(adapter.name)
            adapter = await self._with_code(replace(adapter, path=await self._resolved(adapter)))
            self._adapters[adapter.name] = await self._loaded_or_forgotten(adapter)
        await self._publish(timeout_seconds)
        await self._drop(current.ref, timeout_seconds)
        current.hooks.forget()
        await self._changed()

    async def _update(
        self, name: str, wanted: Adapter, timeout_seconds: float, alias: str | None
    ) -> None:
        dropped: AdapterRef | None = None
        async with self._name_turns.turn(name):
            current = self.describe(name, alias)
            check_flags(wanted)
            if wanted.src != current.src:
                raise AdapterRefusedError("Updating adapter path is not supported.")
            if current.pin and not wanted.pin:
                raise AdapterRefusedError(
                    "Unpinning adapter is not supported. Unregister the adapter and register it "
                    "again without pin."
                )
            wanted = replace(
                wanted,
                path=current.path,
                ref=current.ref,
                is_local=current.is_local,
                hooks=current.hooks,
            )
            if wanted.preload and (wanted.ref is None or wanted.pin):
                wanted = await self._loaded(wanted)
            elif not wanted.preload and current.preload:
                wanted, dropped = replace(wanted, ref=None), current.ref
            self._adapters[name] = wanted
        # Requests that come now load it anew: they need not wait for those that run.
        await self._publish(timeout_seconds)
        await self._drop(dropped, timeout_seconds)
        await self._changed()

    async def _unregister(self, name: str, timeout_seconds: float, alias: str | None) -> None:
        async with self._name_turns.turn(name):
            adapter = self.describe(name, alias)
            del self._adapters[name]
            try:
                await self._publish(timeout_seconds)
                await self._drop(adapter.ref, timeout_seconds)
            except BaseException:
                self._adapters[name] = adapter
                await self._publish()
                raise
            adapter.hooks.forget()
        await self._changed()

    async def _load_on_first_use(self, name: str, alias: str | None) -> Adapter:
        await self._to_its_end(self._load_now(name))
        adapter = self._adapters.get(name)
        if adapter is None:
            raise UnknownAdapterError(alias or name)
        return adapter

    async def _load_now(self, name: str) -> None:
        async with self._name_turns.turn(name):
            adapter = self._adapters.get(name)
            if adapter is None or adapter.ref is not None:
                return
            try:
                self._adapters[name] = await self._loaded(adapter)
            except AdapterCapacityError as error:  # 507 is for those who register
                raise RequestError(error.text) from error
            await self._publish()

    async def _resolved(self, adapter: Adapter) -> str:
        try:
            return await asyncio.to_thread(self._resolve, adapter.src)
        except AdapterRefusedError as error:
            raise type(error)(f"Adapter {adapter.name}: {error.text}") from error

    async def _with_code(self, adapter: Adapter) -> Adapter:
        return replace(adapter, hooks=await self._load_code(adapter.name, adapter.path))

    async def _loaded_or_forgotten(self, adapter: Adapter) -> Adapter:
        """Return the adapter loaded; what its code left behind goes with a refusal."""
        try:
            return await self._loaded(adapter)
        except BaseException:
            adapter.hooks.forget()
            raise

    async def _loaded(self, adapter: Adapter) -> Adapter:
        """Return the adapter loaded, under a new id unless it already is; pinned if it is to be."""
        async with self._engine_turn:
            if adapter.ref is None:
                ref = AdapterRef(adapter.name, adapter.path, next(self._ids), adapter.pin)
            else:
                ref = replace(adapter.ref, pinned=adapter.pin)
            await self._engine.load_adapter(ref)
        return replace(adapter, ref=ref)

    async def _drop(self, ref: AdapterRef | None, timeout_seconds: float) -> None:
        if ref is None:
            return
        if (use := self._uses.get(ref.engine_id)) is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(use.idle.wait(), timeout_seconds)
        async with self._engine_turn:
            await self._engine.unload_adapter(ref)
        self._uses.pop(ref.engine_id, None)

    async def _publish(self, timeout_seconds: float = 0.0) -> None:
        await self.publish(tuple(self._adapters.values()), timeout_seconds)

    async def _changed(self) -> None:
        async with self._state_turn:
            await asyncio.to_thread(self._on_change, tuple(self._adapters.values()))

    async def _to_its_end(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("adapter call refused: %s", error)
