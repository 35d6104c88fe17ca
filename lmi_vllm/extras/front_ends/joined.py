"""The engine that the first process started, as one of its clients; that process decides."""

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
    """The adapters of that engine."""

    def __init__(self, shared: SharedState, base_path: str) -> None:
        self.base = None
        if base_path:
            self.base = LoadedAdapter(BASE_ADAPTER_ID, BASE_ADAPTER_NAME, base_path, "base")
        self._decides = shared
        self._shared: dict[int, SharedAdapter] = {}
        self._loaded: dict[int, LoadedAdapter] = {}

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
        """Know these adapters, which are in the engine; `load` picks among them."""
        self._shared = {adapter.engine_id: adapter for adapter in adapters}

    def find(self, engine_id: int, shown: str) -> LoadedAdapter:
        """Return an adapter that was picked; see `UsableAdapters.find`."""
        known = self._loaded.get(engine_id)
        if known is None:
            raise AdapterRefusedError(f"The adapter {shown} is not loaded")
        return known

    def hold(self, adapter: LoadedAdapter, _shown: str) -> AbstractAsyncContextManager[None]:
        """Keep a slot while the body runs; see `UsableAdapters.hold`."""
        return self._decides.hold(adapter.engine_id)

    async def release(self, adapter: LoadedAdapter) -> None:
        """Do nothing: the weights are the other process's to drop."""

    def load(self, adapter: AdapterRef) -> None:
        """Let an adapter be found that the other process has loaded; others it refuses."""
        shared = self._shared.get(adapter.engine_id)
        if shared is None:  # on its way out, or its engine has died under it
            return
        self._loaded[adapter.engine_id] = LoadedAdapter(
            adapter.engine_id, shared.engine_name, shared.engine_path, adapter.name
        )

    def unload(self, adapter: AdapterRef) -> None:
        """Let no further request find the adapter."""
        self._loaded.pop(adapter.engine_id, None)


class JoinedEngine(VllmClient):
    """The engine of another process, as one of its clients."""

    def __init__(
        self, started: StartedEngine, bridge: Bridge, task: str, adapters: SharedAdapters
    ) -> None:
        super().__init__(started, bridge, task)
        self._adapters = adapters

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
        """Know the adapters that are in the engine."""
        self._adapters.share(adapters)

    def report_requests(self, began: Callable[[str], None]) -> None:
        """Call `began` for each request before the engine has it, with its id there."""
        self._llm.report_requests(began)

    @property
    def engine_requests(self) -> tuple[str, ...]:
        """The requests in the engine, by their ids there."""
        found: tuple[str, ...] = self._llm.engine_requests
        return found

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Let requests use an adapter of the engine; nothing is asked of the engine itself."""
        self._adapters.load(adapter)
        self.http.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget the adapter."""
        self.http.remove_adapter(adapter)
        self._adapters.unload(adapter)

    def engine_died(self) -> None:
        """End every request: the process that started the engine has seen it die."""
        self._llm.engine_died()


async def join_vllm_engine(
    arguments: EngineArguments,
    profile: ServingProfile,
    thread: ThreadPoolExecutor,
    slot: EngineSlot,
    shared: SharedState,
) -> JoinedEngine:
    """Join the engine of another process as one more client; `shared` decides for all of them.

    Raises:
        EngineStartError: the engine could not be joined.
    """
    started = await join_vllm(arguments, thread, slot)
    async with ended_unless_ready(started):
        adapters = SharedAdapters(shared, slot.base_adapter)
        started.llm.join(adapters, is_cpu=started.is_cpu)
        bridge, task = await prepared(started, profile)
        return JoinedEngine(started, bridge, task, adapters)
