"""The registry of LoRA adapters by name."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.hooks import AdapterHooks
from lmi_vllm.adapters.loads import (
    AdapterLoads,
    KeyedLock,
    LoadCode,
    Release,
    Resolve,
    keep_copy,
    no_code,
    shielded,
)
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import (
    AdapterCapacityError,
    AdapterConflictError,
    AdapterRefusedError,
    BadParameterError,
    NoAdapterSlotError,
    NotReadyError,
    RequestError,
    ResourceNotFoundError,
    UnknownAdapterError,
)
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

Change = Callable[[Adapter], Adapter]
MAX_FINDS: Final = 3  # of one request, while what it found makes room for others before it is held


def evicted(name: str) -> NotReadyError:
    """Return the error of a request whose adapter has gone again before it was held."""
    return NotReadyError(f"The adapter {name} was evicted before its request began", 1)


def no_hooks(_registry: "AdapterRegistry") -> AdapterHooks:
    """Return the hooks of a registry that no feature follows."""
    return AdapterHooks()


class AdapterRegistry:
    """Adapters by name; one change of a name at a time, and one engine call at a time.

    `AdapterLoads` loads them (`resolve`, `load_code`, `release`). A change that has begun is
    completed, even if its client disconnects: half a change would leave weights that no call can
    remove. The engine is `kept_awake` meanwhile. `hooks` makes those of this registry. The engine
    has `slots` for adapters; 0 if that is not known.
    """

    def __init__(  # noqa: PLR0913 - one name for each thing that a start knows
        self,
        engine: Engine,
        resolve: Resolve,
        *,
        is_enabled: bool,
        reserved_names: Collection[str] = (),
        slots: int = 0,
        load_code: LoadCode = no_code,
        release: Release = keep_copy,
        hooks: "MakeHooks" = no_hooks,
        kept_awake: "KeptAwake" = contextlib.nullcontext,
    ) -> None:
        self.is_enabled = is_enabled
        self._has_said = False
        self.changes: set[asyncio.Task[Any]] = set()
        self._reserved_names = frozenset(reserved_names)
        self._slots = slots
        self._pins: set[str] = set()  # the names that are pinned, and some that were
        self._adapters: dict[str, Adapter] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count(1)
        self._loads = AdapterLoads(engine, resolve, load_code, release)
        self._names = KeyedLock()
        self._kept_awake = kept_awake
        self._state_lock = asyncio.Lock()
        self.hooks = hooks(self)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(tuple(self._adapters.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def numbered(self) -> Mapping[int, Adapter]:
        """Return the adapters in the order of registration, by numbers that no change alters."""
        known = self._numbers
        known |= {name: next(self._next_number) for name in self._adapters if name not in known}
        self._numbers = {name: number for name, number in known.items() if name in self._adapters}
        by_number = sorted((number, name) for name, number in self._numbers.items())
        return {number: self._adapters[name] for number, name in by_number}

    def check_enabled(self) -> None:
        """Check that adapters may be managed.

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

    def is_from_store(self, name: str) -> bool:
        """Whether `name` is registered, but not by a call or from the model directory."""
        adapter = self._adapters.get(name)
        return adapter is not None and adapter.is_from_store

    def is_used(self, name: str) -> bool:
        """Whether a request uses the adapter; in the first process, a request of any process."""
        adapter = self._adapters.get(name)
        return adapter is not None and self._loads.is_held(adapter.ref)

    async def find_on_demand(self, name: str) -> bool:
        """Return whether a feature's `sharing` or `find` knows the adapter of a request.

        Raises:
            LmiError: it is there and cannot be served now.
        """
        if self.is_enabled and name not in self._reserved_names:
            if self.hooks.sharing is not None:
                await self.hooks.sharing.arrive(name)
            if self.hooks.find is not None:
                return await self.hooks.find(name)
        return self.hooks.sharing is not None and name in self

    @property
    def has_others(self) -> bool:
        """Whether a request may register a name that is not registered yet."""
        return self.hooks.find is not None or self.hooks.sharing is not None

    async def refresh(self, name: str, *, is_searched: bool = True) -> None:
        """Before a call changes it: apply what other servers have done to this name, or found."""
        if self.hooks.sharing is not None:
            await self.hooks.sharing.refresh(name)
            if is_searched and name not in self:
                await self.find_on_demand(name)

    async def remove(self, name: str, timeout_seconds: float, alias: str | None = None) -> None:
        """Unregister for a call; other servers do so too, even if this one cannot find or load it.

        What a feature keeps of a name that could not be registered goes as well.

        Raises:
            ResourceNotFoundError: no adapter of that name.
        """
        try:
            await self.refresh(name)
        except (NotReadyError, RequestError) as error:
            if self.hooks.sharing is None or name in self:
                raise
            logger.warning("adapter %s is removed, though it is not here: %s", name, error.text)
            self.hooks.sharing.note(name, Adapter(name, "", is_from_store=True))
            await self._changed(name)
        else:
            if name not in self and self.hooks.forget is not None and self.hooks.forget(name):
                await self._changed(name)
                return
            await self.unregister(name, timeout_seconds, alias)

    @contextlib.asynccontextmanager
    async def hold(self, name: str, alias: str | None = None) -> AsyncIterator[Adapter]:
        """Yield the loaded adapter that a request names; the load stays while the body runs.

        Raises:
            UnknownAdapterError: no adapter of that name; never the base model instead.
            NoAdapterSlotError: every slot is pinned, by others.
            RequestError: it is registered, but cannot be loaded now.
            NotReadyError: it makes room for others each time before it is held.
        """
        self._say_where_they_are_off()
        for _ in range(MAX_FINDS):
            is_known = await self.find_on_demand(name)
            with contextlib.suppress(UnknownAdapterError):
                while (adapter := self._adapters.get(name)) is not None and adapter.ref is None:
                    await self.load_on_first_use(name, alias)  # it may change in the meantime
            adapter = self._adapters.get(name)
            if adapter is not None and adapter.ref is not None:
                self._check_slot(adapter, alias)
                with self._loads.hold(adapter.ref):
                    yield adapter
                return
            if not is_known:
                raise UnknownAdapterError(alias or name)
        raise evicted(alias or name)

    def _say_where_they_are_off(self) -> None:
        """Log, once, why requests find no adapter: their error is that of any unknown name."""
        if not (self.is_enabled or self._has_said):
            self._has_said = True
            logger.warning(
                "a request names an adapter, and adapters are off: start with "
                "option.enable_lora=true (OPTION_ENABLE_LORA=true)"
            )

    @shielded
    async def load_on_first_use(self, name: str, alias: str | None = None) -> Adapter:
        """Return a registered adapter, after loading it if it was not loaded.

        Raises:
            UnknownAdapterError: no adapter of that name.
            RequestError: it cannot be loaded now.
        """
        async with self._names.hold(name):
            adapter = self._adapters.get(name)
            if adapter is None:
                raise UnknownAdapterError(alias or name)
            if adapter.ref is None:
                try:
                    self._adapters[name] = adapter = await self._loads.load(adapter)
                except AdapterCapacityError as error:  # 507 is only for calls that register
                    raise NoAdapterSlotError(error.text) from error
                await self.publish()
            return adapter

    @shielded
    async def register(self, adapter: Adapter, alias: str | None = None) -> None:
        """Load (if preloaded) and list a new adapter; a failure leaves nothing behind.

        Raises:
            AdapterConflictError: the name is taken, or the source of a kind never loaded.
            BadParameterError: no request can carry the name, or it has too much text.
            AdapterRefusedError: its source or weights are not usable.
        """
        self.check_enabled()
        adapter.check_name()
        adapter.check_size()
        shown = alias or adapter.name
        async with self._changing(adapter.name):
            if adapter.name in self._adapters:
                raise AdapterConflictError(
                    f"The adapter {shown} already exists. "
                    "Unregister it first to register another one under this name."
                )
            if adapter.name in self._reserved_names:
                raise AdapterConflictError(
                    f"The adapter {shown} conflicts with a served base model of that name"
                )
            adapter.check_flags()
            self._put(adapter.name, await self._loads.prepare(adapter))
            await self.publish()
        await self._changed(adapter.name)

    @shielded
    async def replace(
        self, adapter: Adapter, timeout_seconds: float, *, is_in_place: bool = False
    ) -> None:
        """Load new weights under a registered name; running requests end on the old ones.

        With `is_in_place` the name may be a new one, and the old entry's pin and options stay.

        Raises:
            ResourceNotFoundError: no adapter of that name.
            AdapterConflictError: a call has put its own in the place of one that was found.
            AdapterRefusedError: the new weights cannot be loaded; the old ones stay.
        """
        self.check_enabled()
        adapter.check_name()
        adapter.check_size()
        name = adapter.name
        async with self._changing(name):
            is_new = is_in_place and name not in self
            current = adapter if is_new else self.describe(name)
            if is_in_place:
                adapter = replace(adapter, pin=current.pin, options=current.options)
            if adapter.is_from_store and not current.is_from_store:
                raise AdapterConflictError(f"The adapter {name} was registered by a call")
            self._put(name, await self._loads.prepare(adapter, current.ref))
        await self.publish(timeout_seconds)
        await self._loads.unload(current.ref, timeout_seconds)
        if not is_new:
            await self._loads.forget_files(current)
        await self._changed(name)

    @shielded
    async def update(
        self,
        name: str,
        change: Change,
        timeout_seconds: float,
        alias: str | None = None,
        *,
        reads_again: bool = False,
    ) -> None:
        """Change preload, pin and options of an adapter; on failure the old entry stays.

        `change` gets the entry when its turn has come: calls before it may have changed it. With
        `reads_again` files that have changed replace the old ones, as in `replace`.

        Raises:
            ResourceNotFoundError: no adapter of that name.
            AdapterRefusedError: the change is not supported, or cannot be carried out.
        """
        self.check_enabled()
        dropped: AdapterRef | None = None
        outdated: Adapter | None = None
        async with self._changing(name):
            current = self.describe(name, alias)
            wanted = current.updated(change(current))
            if reads_again and await self._loads.has_new_files(current):
                wanted = await self._loads.prepare(wanted.as_read_again(), current.ref)
                outdated, dropped = current, current.ref
            elif wanted.preload and (wanted.ref is None or wanted.pin):
                wanted = await self._loads.load(wanted)
            elif not wanted.preload and current.preload:
                wanted, dropped = replace(wanted, ref=None), current.ref
            self._put(name, wanted)
        # New requests load it again: they need not wait for the running ones.
        await self.publish(timeout_seconds)
        await self._loads.unload(dropped, timeout_seconds)
        if outdated is not None:
            await self._loads.forget_files(outdated)
        await self._changed(name)

    @shielded
    async def unregister(
        self,
        name: str,
        timeout_seconds: float,
        alias: str | None = None,
        *,
        only_from_store: bool = False,
    ) -> None:
        """Stop routing to the adapter, wait for its requests (bounded), then drop its weights.

        With `only_from_store` an adapter that a call has registered stays.

        Raises:
            ResourceNotFoundError: no adapter of that name.
        """
        self.check_enabled()
        async with self._changing(name):
            adapter = self.describe(name, alias)
            if only_from_store and not adapter.is_from_store:
                return
            if only_from_store:
                del self._adapters[name]  # not a call's change
            else:
                self._put(name, None)
            try:
                await self._loads.unpin(adapter.ref)
                await self.publish(timeout_seconds)
                await self._loads.unload(adapter.ref, timeout_seconds)
            except BaseException:
                # Not noted: other servers may have dropped it already. `sharing` retries the
                # removal.
                self._adapters[name] = adapter
                await self.publish()
                raise
            await self._loads.forget_files(adapter)
        await self._changed(name)

    async def move_to(self, engine: Engine) -> None:
        """Load every loaded adapter into a new engine, before it serves; ids are new as well.

        If an adapter's files are gone, it stays listed and a request for it is an error: the other
        adapters and the base model must not wait for it. Adapters that were found are loaded by
        their next request.

        Raises:
            EngineFailureError: the new engine failed, too.
        """
        first_id = await self._loads.move_to(engine)
        for name in tuple(self._adapters):
            async with self._names.hold(name):
                adapter = self._adapters.get(name)
                ref = None if adapter is None else adapter.ref
                if adapter is None or ref is None or ref.engine_id >= first_id:
                    continue
                self._loads.forget(ref)
                moved = replace(adapter, ref=None)
                try:
                    if adapter.pin or not adapter.is_from_store:
                        moved = await self._loads.load(moved)
                except AdapterRefusedError as error:
                    logger.error(
                        "adapter %s could NOT be loaded into the new engine: %s", name, error.text
                    )
                self._adapters[name] = moved

    def _check_slot(self, adapter: Adapter, alias: str | None) -> None:
        """Check that not every slot belongs to another adapter for good.

        The engine checks it again, but its refusal reaches some routes in vLLM's own words.

        Raises:
            NoAdapterSlotError: every slot is pinned.
        """
        if adapter.pin or len(self._pins) < self._slots or not self._slots:
            return
        found = [self._adapters.get(name) for name in self._pins]
        pinned = {one.name for one in found if one is not None and one.pin}
        self._pins = pinned
        if len(pinned) >= self._slots:
            raise NoAdapterSlotError(
                f"No free lora slots for adapter {alias or adapter.name}: all {self._slots} are "
                "pinned"
            )

    @contextlib.asynccontextmanager
    async def _changing(self, name: str) -> AsyncIterator[None]:
        # In this order: an engine that wakes takes the names of its adapters.
        async with self._kept_awake(), self._names.hold(name):
            if self.hooks.sharing is not None:
                self.hooks.sharing.check(name)
            yield

    async def publish(self, timeout_seconds: float = 0.0) -> None:
        """Send the list to other processes; returns once they route by it."""
        if self.hooks.publish is not None:
            await self.hooks.publish(tuple(self), timeout_seconds)

    def _put(self, name: str, adapter: Adapter | None) -> None:
        """List the adapter, or none; no other task runs between this and its note."""
        before = self._adapters.pop(name, None) if adapter is None else self._adapters.get(name)
        if adapter is not None:
            self._adapters[name] = adapter
            if adapter.pin:
                self._pins.add(name)
        if self.hooks.sharing is not None:
            self.hooks.sharing.note(name, before)

    async def _changed(self, name: str) -> None:
        async with self._state_lock:
            if self.hooks.on_change is not None:
                await asyncio.to_thread(self.hooks.on_change, tuple(self))
        if self.hooks.sharing is not None:
            await self.hooks.sharing.changed(name)


MakeHooks = Callable[[AdapterRegistry], AdapterHooks]
# Keeps the engine awake while the body of its context runs.
KeptAwake = Callable[[], contextlib.AbstractAsyncContextManager[None]]
