"""A client of the engine that the first process started; that process decides about adapters."""

import asyncio
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from lmi_vllm.engine.base import EngineClient, start_error
from lmi_vllm.engine.vllm.adapters import BASE_ADAPTER_ID, BASE_ADAPTER_NAME
from lmi_vllm.engine.vllm.async_llm import EngineSetup, GuardedAsyncLLM, client_of
from lmi_vllm.engine.vllm.bridge import Bridge
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.configuration import VllmArguments, engine_config, runs_on_cpu
from lmi_vllm.engine.vllm.engine import (
    VllmClient,
    ended_unless_ready,
    prepared,
    while_alive,
)
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.engine.vllm.forks import adopt_forked_engines
from lmi_vllm.engine.vllm.processes import claim_children
from lmi_vllm.engine.vllm.workarounds.lost_cores import end_waiting
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.messages import AdapterRef, EngineArguments, ServingProfile

LOOK_SECONDS: Final = 0.1

Report = Callable[[str], None]  # of a request, by its id in the engine
# Waits until the adapter of an engine id may be used: it may while the context is entered. Raises
# an LmiError where it cannot, now or ever.
HoldSlot = Callable[[int], AbstractAsyncContextManager[None]]


class LoadedAdapters:
    """The adapters of the shared engine; the first process allocates their slots."""

    def __init__(self, hold_slot: HoldSlot, base_path: str) -> None:
        self.base = None
        if base_path:
            self.base = LoadedAdapter(BASE_ADAPTER_ID, BASE_ADAPTER_NAME, base_path, "base")
        self._hold_slot = hold_slot
        self._shared: dict[int, LoadedAdapter] = {}
        self._loaded: dict[int, LoadedAdapter] = {}

    def share(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Set the adapters that are in the engine; `load` picks among them."""
        self._shared = {adapter.engine_id: adapter for adapter in adapters}

    def find(self, engine_id: int, shown: str) -> LoadedAdapter:
        """Return an adapter that `load` has picked; see `UsableAdapters.find`."""
        known = self._loaded.get(engine_id)
        if known is None:
            raise AdapterRefusedError(f"The adapter {shown} is not loaded")
        return known

    def hold(self, adapter: LoadedAdapter, _shown: str) -> AbstractAsyncContextManager[None]:
        """Hold a slot while the body runs; see `UsableAdapters.hold`."""
        return self._hold_slot(adapter.engine_id)

    async def release(self, adapter: LoadedAdapter) -> None:
        """Do nothing: the first process releases the weights."""

    def load(self, adapter: AdapterRef) -> None:
        """Make an adapter usable that the first process has loaded; others are ignored."""
        shared = self._shared.get(adapter.engine_id)
        if shared is None:  # being unloaded, or its engine has died
            return
        self._loaded[adapter.engine_id] = LoadedAdapter(
            adapter.engine_id, shared.name, shared.path, adapter.name
        )

    def unload(self, adapter: AdapterRef) -> None:
        """Make the adapter unusable for further requests."""
        self._loaded.pop(adapter.engine_id, None)


class JoinedEngine(VllmClient):
    """The engine of another process, as one of its clients."""

    def __init__(
        self, llm: GuardedAsyncLLM, bridge: Bridge, task: str, adapters: LoadedAdapters
    ) -> None:
        super().__init__(llm, bridge, task)
        self.adapters = adapters

    @property
    def engine_requests(self) -> tuple[str, ...]:
        """The ids of this client's requests in the engine."""
        return tuple(self._llm.output_processor.request_states)

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Let requests use an adapter that the engine has; the engine itself is not called."""
        self.adapters.load(adapter)
        self.http.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Let no further request use the adapter."""
        self.http.remove_adapter(adapter)
        self.adapters.unload(adapter)

    def engine_died(self) -> None:
        """End every request with EngineDeadError: the first process has seen the engine die."""
        self._llm.engine_died()


async def join_vllm_engine(  # noqa: PLR0913, PLR0917 - one name for each thing that is joined
    client: EngineClient,
    arguments: EngineArguments,
    profile: ServingProfile,
    checked: VllmArguments | None,
    thread: ThreadPoolExecutor,
    parts: EngineParts,
    hold_slot: HoldSlot,
    began: Report,
    left: asyncio.Event,
) -> JoinedEngine:
    """Return a client of another process's engine; `hold_slot` is the same for all clients.

    `began` is called for each request before the engine has it, with its id there. Arguments that
    were `checked` are not read again. `left` says that the engine has died, or is to be left.

    Raises:
        EngineStartError: the engine could not be joined; the text is the root cause.
        EngineDeadError: it was left before it was joined.
    """
    adapters = LoadedAdapters(hold_slot, client.base_adapter)

    def join() -> GuardedAsyncLLM:
        claim_children()  # those that try grammars
        is_cpu, read = runs_on_cpu(), VllmArguments.of(arguments, checked)
        names = profile.served_names
        count, index = client.count, client.index
        config = engine_config(read.namespace, count, index, is_cpu=is_cpu, names=names)
        if sys.platform == "linux":
            adopt_forked_engines()
        setup = EngineSetup(read, config, profile, thread, is_cpu, parts)
        llm = GuardedAsyncLLM(setup, client_of(client), began)
        llm.adapters = adapters
        return llm

    try:
        llm = await _unless_left(
            asyncio.get_running_loop().run_in_executor(thread, join), client.input_address, left
        )
    except Exception as error:
        text = f"the engine could not be joined: {type(error).__name__}: {error}"
        raise start_error(text) from error
    async with ended_unless_ready(llm):
        bridge, task = await while_alive(llm, prepared(llm), left.is_set)
        return JoinedEngine(llm, bridge, task, adapters)


async def _unless_left(
    joining: "asyncio.Future[GuardedAsyncLLM]", address: str, left: asyncio.Event
) -> GuardedAsyncLLM:
    """Return what joins; once the engine is left, it waits for no answer of that any more."""
    leaving = asyncio.create_task(left.wait())
    try:
        ends: set[asyncio.Future[Any]] = {joining, leaving}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        while not joining.done():  # it may not wait yet
            await asyncio.to_thread(end_waiting, address)
            await asyncio.wait({joining}, timeout=LOOK_SECONDS)
    finally:
        leaving.cancel()
    return joining.result()
