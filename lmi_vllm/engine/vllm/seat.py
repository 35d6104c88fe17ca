"""The engine of another process behind the `Engine` protocol, as one of its clients."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from lmi_vllm.engine.base import SharedState
from lmi_vllm.engine.vllm.engine import VllmEngine, make_engine
from lmi_vllm.engine.vllm.start import join_vllm
from lmi_vllm.messages import (
    AdapterRef,
    EngineArguments,
    EngineSeat,
    ServingProfile,
    SharedAdapter,
)


async def join_vllm_engine(
    arguments: EngineArguments,
    profile: ServingProfile,
    thread: ThreadPoolExecutor,
    seat: EngineSeat,
    shared: SharedState,
) -> "SeatedEngine":
    """Take a seat at the engine of another process; `shared` is what it decides for all.

    Raises:
        EngineStartError: the engine could not be joined.
    """
    started = await join_vllm(arguments, thread, seat)

    async def take_seat() -> None:
        started.llm.take_seat(seat, shared, is_cpu=started.is_cpu)

    return await make_engine(SeatedEngine, started, profile, take_seat)


class SeatedEngine(VllmEngine):
    """The engine of another process, as one of its clients."""

    def share(self, adapters: Iterable[SharedAdapter]) -> None:
        """Know the adapters that are in the engine."""
        self._llm.share(adapters)

    def report_requests(self, began: Callable[[str], None]) -> None:
        """Tell of each request before the engine has it, by its id there."""
        self._llm.report_requests(began)

    @property
    def engine_requests(self) -> tuple[str, ...]:
        """The requests in the engine, by their ids there."""
        return tuple(self._llm.output_processor.request_states)

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Let requests use an adapter of the engine; nothing is asked of the engine itself."""
        await self._llm.load(adapter)
        self._openai.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget the adapter."""
        self._openai.remove_adapter(adapter)
        await self._llm.unload(adapter)

    def engine_died(self) -> None:
        """End every request: the process that started the engine has seen it die."""
        self._llm.engine_died()
