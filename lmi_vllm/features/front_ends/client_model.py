"""The model of a front-end process: a client of the engine of the first one, and its adapters."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmi_vllm.engine.factory import freeze_heap, refreeze_heap
from lmi_vllm.engine.vllm.factory import import_vllm
from lmi_vllm.engine.vllm.forks import new_engine_thread
from lmi_vllm.errors import LmiError
from lmi_vllm.features.front_ends.channel import (
    AdapterList,
    Channel,
    HoldAdapter,
    JoinEngine,
    LoadAdapter,
    ReleaseAdapter,
    RequestStarted,
)
from lmi_vllm.features.front_ends.mirrored_adapters import MirroredAdapters
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import GENERATE, EngineArguments
from lmi_vllm.server.context import ModelContext
from lmi_vllm.server.parts import Assembled
from lmi_vllm.server.warm_up import warm_up

if TYPE_CHECKING:
    from lmi_vllm.engine.vllm.configuration import VllmArguments
    from lmi_vllm.engine.vllm.joined import JoinedEngine


@dataclass(frozen=True, slots=True)
class Figures:
    """This process's figures at the engine; `requests` are ids there, None without an engine."""

    running: int = 0
    steps: int = 0
    requests: tuple[str, ...] | None = None
    not_finite: int = 0
    begun: int = 0  # requests that the first process was told of


class ClientModel:
    """Serves over an engine that the first process started, for as long as it runs."""

    def __init__(
        self,
        service: InferenceService,
        channel: Channel,
        made: Assembled,
        environ: Mapping[str, str],
    ) -> None:
        self._service = service
        self._assembled = made
        self._environ = environ
        self._model: ModelContext | None = None
        self._first = RemoteAdapters(channel)
        self._channel = channel
        self._thread: ThreadPoolExecutor | None = new_engine_thread()
        self._engine_lock = asyncio.Lock()
        self._left = asyncio.Event()  # the engine has died, or is to be left
        self._list_lock = asyncio.Lock()
        self._engine: JoinedEngine | None = None
        self._checked: VllmArguments | None = None
        self._adapters: MirroredAdapters | None = None
        self._begun = 0

    async def load(self, arguments: EngineArguments) -> None:
        """Import vLLM, while the first process starts the engine."""
        load = partial(import_vllm, arguments)
        self._checked = await asyncio.get_running_loop().run_in_executor(self._thread, load)

    async def join(self, message: JoinEngine, *, is_first: bool) -> bool:
        """Join the engine and run a warm-up request on it; False if it has to be left before.

        Raises:
            EngineStartError: the engine could not be joined.
        """
        async with self._engine_lock:
            self._left.clear()
            try:
                await self._join(message)
            except LmiError:
                if self._left.is_set():
                    return False
                raise
            if is_first:
                freeze_heap()
            else:
                refreeze_heap()
        return True

    async def leave(self) -> None:
        """Leave the engine, if it was joined; returns when its sockets are closed."""
        if self._engine_lock.locked():  # it is being joined
            self.engine_died()
        async with self._engine_lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                await engine.close()
                if not self._service.lifecycle.is_resting:  # else requests wait for the next one
                    self._service.detach()

    async def follow(self, message: AdapterList) -> None:
        """Route by the list; returns when no request uses an adapter that it leaves out."""
        if self._adapters is None or self._engine is None:
            raise RuntimeError("the engine has not been joined")
        adapters = self._adapters
        async with self._list_lock:  # an older list must not overwrite a newer one
            self._engine.adapters.share(message.shared)
            gone = await adapters.follow(message.adapters)
        await adapters.wait_unused(gone, message.timeout_seconds)

    def engine_died(self) -> None:
        """End the requests in the engine; only its parent process is notified of its death."""
        self._left.set()
        if self._engine is not None:
            self._engine.engine_died()

    def figures(self) -> Figures:
        """Return this process's figures at the engine; zeros without one."""
        if (engine := self._engine) is None:
            return Figures()
        return Figures(
            engine.running_requests,
            engine.progress,
            engine.engine_requests,
            engine.not_finite,
            self._begun,
        )

    def _tell_of_request(self, request: str) -> None:
        self._begun += 1
        self._channel.send(RequestStarted(request))

    async def drained(self) -> None:
        """Call what follows the last request."""
        if self._model is not None:
            for end in self._model.on_drained:
                await end()

    async def close(self) -> None:
        """Leave the engine at the end of the process."""
        if self._engine is not None:
            await self._engine.close()
        await self._end_model()

    async def _end_model(self) -> None:
        if self._model is not None:
            await self._model.leave()

    async def _join(self, message: JoinEngine) -> None:
        from lmi_vllm.engine.vllm.joined import join_vllm_engine

        self._thread = self._thread or new_engine_thread()
        self._engine = engine = await join_vllm_engine(
            message.client,
            message.arguments,
            message.profile,
            self._checked,
            self._thread,
            self._assembled.parts.engines.vllm,
            self._first.hold,
            self._tell_of_request,
            self._left,
        )
        self._thread = None  # the engine owns the thread from here on
        if engine.task == GENERATE:
            with engine.uncounted():
                await warm_up(engine)
        service, profile = self._service, message.profile
        service.expect(message.model_url, profile)
        service.lifecycle.expect_model(message.model_name)
        service.rest.wait_seconds = message.settings.server.lmi_wake_timeout
        await self._end_model()
        self._model = model = ModelContext(
            service, message.settings, message.arguments, self._environ,
            self._assembled.configuration.sources, is_first=False,
        )  # fmt: skip
        await model.enter(self._assembled.parts.model_parts)
        self._adapters = MirroredAdapters(
            engine,
            self._first.load,
            is_enabled=profile.enable_lora,
            reserved_names=profile.served_names,
            slots=profile.adapter_slots,
            hooks=lambda registry: model.adapter_hooks(registry, None),
        )
        for begin in self._adapters.hooks.begin:
            await begin()
        service.attach(Runtime(engine, profile, self._adapters, steps=model.steps))


class RemoteAdapters:
    """Adapter slots and loads, which the first process decides for all."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @contextlib.asynccontextmanager
    async def hold(self, adapter: int) -> AsyncIterator[None]:
        """Hold an adapter's slot while the body runs.

        Raises:
            LmiError: the adapter cannot be used.
            NotReadyError: the first process is gone.
        """
        number = self._channel.new_number()
        try:
            await self._channel.call(HoldAdapter(number, adapter))
            yield
        finally:
            self._channel.send(ReleaseAdapter(number))

    async def load(self, name: str) -> None:
        """Wait until the first process has loaded a registered adapter.

        Raises:
            LmiError: it cannot be loaded.
        """
        await self._channel.call(LoadAdapter(self._channel.new_number(), name))
