"""A client of the engine that the first process started; that process decides about adapters."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

from lmi_vllm.engine.base import SharedState
from lmi_vllm.engine.vllm.adapters import BASE_ADAPTER_ID, BASE_ADAPTER_NAME
from lmi_vllm.engine.vllm.bridge import Bridge
from lmi_vllm.engine.vllm.engine import VllmClient, ended_unless_ready, prepared
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.engine.vllm.start import StartedEngine, join_vllm
from lmi_vllm.errors import AdapterRefusedError
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    EngineSlot,
    ServingProfile,
    SharedAdapter,
)


class SharedAdapters:
    """The adapters of the shared engine; the first process allocates their slots."""

    def __init__(self, shared: SharedState, base_path: str) -> None:
        self.base = None
        if base_path:
            self.base = LoadedAdapter(BASE_ADAPTER_ID, BASE_ADAPTER_NAME, base_path, "base")
        self._decides = shared
        self._shared: dict[int, SharedAdapter] = {}
        self._loaded: dict[int, LoadedAdapter] = {}

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
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
        return self._decides.hold(adapter.engine_id)

    async def release(self, adapter: LoadedAdapter) -> None:
        """Do nothing: the first process releases the weights."""

    def load(self, adapter: AdapterRef) -> None:
        """Make an adapter usable that the first process has loaded; others are ignored."""
        shared = self._shared.get(adapter.engine_id)
        if shared is None:  # being unloaded, or its engine has died
            return
        self._loaded[adapter.engine_id] = LoadedAdapter(
            adapter.engine_id, shared.engine_name, shared.engine_path, adapter.name
        )

    def unload(self, adapter: AdapterRef) -> None:
        """Make the adapter unusable for further requests."""
        self._loaded.pop(adapter.engine_id, None)


class JoinedEngine(VllmClient):
    """The engine of another process, as one of its clients."""

    def __init__(
        self, started: StartedEngine, bridge: Bridge, task: str, adapters: SharedAdapters
    ) -> None:
        super().__init__(started, bridge, task)
        self._adapters = adapters

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
        """Set the adapters that are in the engine."""
        self._adapters.share(adapters)

    def report_requests(self, began: Callable[[str], None]) -> None:
        """Call `began` for each request before the engine has it, with its id there."""
        self._llm.report_requests(began)

    @property
    def engine_requests(self) -> tuple[str, ...]:
        """The ids of this client's requests in the engine."""
        found: tuple[str, ...] = self._llm.engine_requests
        return found

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Let requests use an adapter that the engine has; the engine itself is not called."""
        self._adapters.load(adapter)
        self.http.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Let no further request use the adapter."""
        self.http.remove_adapter(adapter)
        self._adapters.unload(adapter)

    def engine_died(self) -> None:
        """End every request with EngineDeadError: the first process has seen the engine die."""
        self._llm.engine_died()


async def join_vllm_engine(
    arguments: EngineArguments,
    profile: ServingProfile,
    thread: ThreadPoolExecutor,
    slot: EngineSlot,
    shared: SharedState,
) -> JoinedEngine:
    """Return a client of another process's engine; `shared` decides about adapters for all clients.

    Raises:
        EngineStartError: the engine could not be joined.
    """
    started = await join_vllm(arguments, thread, slot)
    async with ended_unless_ready(started):
        adapters = SharedAdapters(shared, slot.base_adapter)
        started.llm.join(adapters, is_cpu=started.is_cpu)
        bridge, task = await prepared(started, profile)
        return JoinedEngine(started, bridge, task, adapters)
