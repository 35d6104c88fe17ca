"""Several clients of one vLLM engine: seats for them, and an `AsyncLLM` that takes one.

vLLM's engine core serves as many clients as it is given addresses; its own `--api-server-count`
works so. The first client, which starts the engine, is an `IsolatingAsyncLLM` as ever and keeps
what all of them share: which adapters are loaded, and which may be in the engine together. The
others ask it (`SharedState`), so that one table decides for all.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core_client
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.engine.base import SharedState
from lmi_vllm.engine.vllm.isolation import BASE_ADAPTER_ID, BASE_ADAPTER_NAME, IsolatingAsyncLLM
from lmi_vllm.errors import EngineStartError, LmiError
from lmi_vllm.messages import AdapterRef, EngineSeat, SharedAdapter

_LAUNCH: Final = "launch_core_engines"


@contextlib.contextmanager
def seats_for(seats: tuple[EngineSeat, ...]) -> Iterator[None]:
    """Have the engine that is started in the body serve these clients, too."""
    launch: Any = getattr(core_client, _LAUNCH, None)
    if launch is None:
        raise EngineStartError(
            f"this vLLM has no vllm.v1.engine.core_client.{_LAUNCH}: LMI_FRONTEND_PROCESSES cannot "
            "be more than 1 with it"
        )

    def launch_with_seats(config: Any, executor_class: Any, log_stats: bool, addresses: Any) -> Any:
        addresses.inputs.extend(seat.input_address for seat in seats)
        addresses.outputs.extend(seat.output_address for seat in seats)
        return launch(config, executor_class, log_stats, addresses)

    setattr(core_client, _LAUNCH, launch_with_seats)
    try:
        yield
    finally:
        setattr(core_client, _LAUNCH, launch)


def client_options(seat: EngineSeat) -> dict[str, Any]:
    """Return what `AsyncLLM.from_vllm_config` takes for a seat."""
    addresses = {"input_address": seat.input_address, "output_address": seat.output_address}
    if seat.stats_address is not None:
        addresses["stats_update_address"] = seat.stats_address
    return {
        "client_addresses": addresses,
        "client_count": seat.clients,
        "client_index": seat.index,
    }


class SeatedAsyncLLM(IsolatingAsyncLLM):
    """An AsyncLLM on an engine that another process started, and that guards it for us."""

    _shared: Mapping[int, SharedAdapter]

    def take_seat(self, seat: EngineSeat, shared: SharedState, *, is_cpu: bool) -> None:
        """Prepare the guards; instead of `isolate`."""
        self._prepare(_SharedSlots(shared), is_cpu=is_cpu)
        self._shared = {}
        if self.vllm_config.lora_config is not None and seat.base_adapter:
            self._base_lora = LoRARequest(BASE_ADAPTER_NAME, BASE_ADAPTER_ID, seat.base_adapter)

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
        """Know these adapters, which are in the engine; `load` picks among them."""
        self._shared = {adapter.engine_id: adapter for adapter in adapters}

    async def load(self, adapter: AdapterRef) -> None:
        """Let `generate` use an adapter that the first process has loaded; others it refuses."""
        shared = self._shared.get(adapter.engine_id)
        if shared is None:  # on its way out, or its engine has died under it
            return
        self._adapters[adapter.engine_id] = LoRARequest(
            shared.engine_name, adapter.engine_id, shared.engine_path
        )
        self._names[adapter.engine_id] = adapter.name

    async def unload(self, adapter: AdapterRef) -> None:
        """Let no further request use the adapter; its weights are the first process's to drop."""
        self._adapters.pop(adapter.engine_id, None)
        self._names.pop(adapter.engine_id, None)

    def report_requests(self, began: Callable[[str], None]) -> None:
        """Tell of each request before the engine has it, by its id there."""
        self.output_processor.report = began

    def engine_died(self) -> None:
        """End every request as if we had seen the engine die; only its parent does see that."""
        client: Any = self.engine_core
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(VllmEngineDeadError())


class _SharedSlots:
    """What `IsolatingAsyncLLM` asks of its slots, decided elsewhere."""

    count = 0
    is_all_pinned = False  # `hold` says so

    def __init__(self, shared: SharedState) -> None:
        self._shared = shared

    def is_pinned(self, _adapter: int) -> bool:
        return False

    def running(self, _adapter: int) -> int:
        return 1  # never ours to clean up

    async def pin(self, _adapter: int, _timeout_seconds: float) -> None:
        raise NotImplementedError  # the first process's work

    def unpin(self, _adapter: int) -> None:
        raise NotImplementedError

    @contextlib.asynccontextmanager
    async def hold(self, adapter: int) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as held:
            try:
                await held.enter_async_context(self._shared.hold(adapter))
            except LmiError as error:
                raise VLLMValidationError(error.text) from error
            yield
