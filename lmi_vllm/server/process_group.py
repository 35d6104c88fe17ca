"""What a server does about further processes that answer at its port; by itself there is one."""

import asyncio
from collections.abc import Callable, Mapping

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.config.listen import ListenAddress
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import EngineArguments, EngineSeat, ServingProfile


class ProcessGroup:
    """Processes beside the first one that answer requests over its engine: by itself none."""

    first_socket = ""  # where they reach the first process

    def __init__(self) -> None:
        self.failed = asyncio.Event()  # more of them ended than can be replaced over one engine

    def opened(self, address: ListenAddress) -> None:
        """Take the address where all of them are to answer."""

    def begin(self, settings: Settings, arguments: EngineArguments) -> None:
        """Start the processes unless they run: they load what they need while the engine starts."""

    def new_seats(self) -> tuple[EngineSeat, ...]:
        """Return the seats to reserve at the engine that is started next."""
        return ()

    async def join(
        self, engine: Engine, profile: ServingProfile, adapters: AdapterRegistry
    ) -> None:
        """Let the processes join the engine; returns once all of them answer requests.

        Raises:
            EngineStartError: one of them could not.
        """

    def engine_died(self) -> None:
        """Have each of them end its requests: the engine is gone."""

    async def detach(self) -> None:
        """Have the processes leave the engine; they answer on, with what the first process says."""

    async def end(self) -> None:
        """End the processes."""

    def remove(self) -> None:
        """Remove what was made for them."""


MakeProcesses = Callable[[InferenceService, Settings, Mapping[str, str]], ProcessGroup | None]
