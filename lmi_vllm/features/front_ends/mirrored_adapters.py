"""The adapters of a further front-end process: a read-only replica of the first one's."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry, MakeHooks, evicted, no_hooks
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import UnknownAdapterError
from lmi_vllm.hooks import NO_HOOKS
from lmi_vllm.messages import AdapterRef

AskToLoad = Callable[[str], Awaitable[None]]  # by name; raises as AdapterRegistry.load_on_first_use


class MirroredAdapters(AdapterRegistry):
    """Routes requests by the first process's list of adapters; only that process changes it."""

    def __init__(
        self,
        engine: Engine,
        ask_to_load: AskToLoad,
        *,
        is_enabled: bool,
        reserved_names: Collection[str] = (),
        slots: int = 0,
        hooks: MakeHooks = no_hooks,
    ) -> None:
        super().__init__(
            engine,
            _no_source,
            is_enabled=is_enabled,
            reserved_names=reserved_names,
            slots=slots,
            hooks=hooks,
        )
        self._ask_to_load = ask_to_load

    async def follow(self, adapters: Collection[Adapter]) -> list[AdapterRef]:
        """Route by this list from now on; return the loaded adapters that it leaves out.

        Not safe for concurrent calls: the caller follows one list after the other.
        """
        before = self._refs()
        new = {adapter.name: adapter for adapter in adapters}
        wanted = {adapter.ref.engine_id: adapter.ref for adapter in new.values() if adapter.ref}
        gone = [ref for number, ref in before.items() if number not in wanted]
        for number, ref in wanted.items():
            if number not in before:
                await self._loads.engine.load_adapter(ref)
        self._adapters = new
        self._pins = {name for name, adapter in new.items() if adapter.pin}
        return gone

    async def wait_unused(self, gone: Collection[AdapterRef], timeout_seconds: float) -> None:
        """Wait until no request uses these adapters, or for `timeout_seconds`."""
        await asyncio.gather(*(self._loads.unload(ref, timeout_seconds) for ref in gone))

    def _refs(self) -> dict[int, AdapterRef]:
        return {a.ref.engine_id: a.ref for a in self._adapters.values() if a.ref is not None}

    async def load_on_first_use(self, name: str, alias: str | None = None) -> Adapter:
        """Return the adapter once the first process has loaded it.

        Raises:
            UnknownAdapterError: it knows no adapter of that name, or a call has removed it.
            NotReadyError: the adapter has gone again, where it may have made room for others.
        """
        try:
            await self._ask_to_load(name)
        except UnknownAdapterError as error:
            raise UnknownAdapterError(alias or name) from error
        adapter = self._adapters.get(name)
        if adapter is None:
            raise evicted(alias or name) if self.has_others else UnknownAdapterError(alias or name)
        return adapter


def without_hooks(adapter: Adapter) -> Adapter:
    """Return the adapter without its hooks, which cannot be pickled for another process."""
    return replace(adapter, hooks=NO_HOOKS)


def _no_source(source: str) -> str:
    raise NotImplementedError(source)  # adapters are registered in the first process
