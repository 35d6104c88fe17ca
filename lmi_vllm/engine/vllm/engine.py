"""`AsyncLLM` behind the `Engine` protocol, started here; clients in other processes may join it."""

import asyncio
import contextlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import replace
from typing import Any, Final, TypeVar

from lmi_vllm.engine.base import (
    ActiveAdapters,
    DirectChunks,
    DirectEvents,
    EngineClient,
    OtherClients,
    start_error,
)
from lmi_vllm.engine.deaths import ENGINE_DIED
from lmi_vllm.engine.vllm.adapters import EngineAdapters
from lmi_vllm.engine.vllm.async_llm import (
    GuardedAsyncLLM,
    LeadingAsyncLLM,
    engine_processes,
)
from lmi_vllm.engine.vllm.bridge import Bridge
from lmi_vllm.engine.vllm.configuration import cache_environment, release_environment
from lmi_vllm.engine.vllm.engine_calls import LoadedAdapter
from lmi_vllm.engine.vllm.engine_processes import EngineProcesses
from lmi_vllm.engine.vllm.forks import in_own_thread
from lmi_vllm.engine.vllm.jobs import JobRunner, PromptTokenizer
from lmi_vllm.engine.vllm.names import (
    our_errors,
)
from lmi_vllm.engine.vllm.openai import VllmOpenAI
from lmi_vllm.engine.vllm.start import ERRORS
from lmi_vllm.engine.vllm.workarounds.kept_tokenizers import forget_tokenizers
from lmi_vllm.engine.vllm.workarounds.media_places import name_missing_places
from lmi_vllm.engine.vllm.workarounds.text_lengths import TextLengths, guard_lengths
from lmi_vllm.errors import EngineDeadError, LmiError
from lmi_vllm.messages import (
    AdapterRef,
    GenerationChunk,
    GenerationJob,
    OpenAICall,
    OpenAIReply,
    PromptToken,
)

T = TypeVar("T")

DEATH_POLL_SECONDS: Final = 0.2
SHUTDOWN_SECONDS: Final = 5.0
LIST_OF_MODELS: Final = "models"
LAST_ANSWER_SECONDS: Final = 2.0
KILL_SECONDS: Final = 10.0  # the kernel frees a large memory before a process is gone


async def engine_of(llm: LeadingAsyncLLM, clients: tuple[EngineClient, ...] = ()) -> "VllmEngine":
    """Return the engine that was started, with everything that request handling needs of it.

    Raises:
        EngineStartError: it did not come up, or has died since.
    """
    errors = llm.folder.path / ERRORS
    processes = EngineProcesses(engine_processes(llm), llm.setup.oom_kills, errors)

    async def prepare() -> tuple[Bridge, str]:
        await llm.keep_base_rows_apart()
        return await prepared(llm)

    async with ended_unless_ready(llm):
        try:
            bridge, task = await while_alive(llm, prepare())
        except Exception as error:
            if not llm.errored:
                raise
            reason = await processes.reason()
            raise start_error(f"the engine did not start: {reason}") from error
        return VllmEngine(llm, bridge, task, clients, processes)


@contextlib.asynccontextmanager
async def ended_unless_ready(llm: GuardedAsyncLLM) -> AsyncIterator[None]:
    """End what was started where the body fails."""
    try:
        yield
    except BaseException as error:
        llm.clean_up()
        llm.shutdown()
        if isinstance(error, Exception) and not isinstance(error, LmiError):
            raise start_error(f"the engine did not start: {error}") from error
        raise


async def while_alive(
    llm: GuardedAsyncLLM,
    call: Coroutine[Any, Any, T],
    is_closing: Callable[[], bool] = lambda: False,
) -> T:
    """Return what a call of the engine gives; vLLM does not answer one after the engine's end.

    Raises:
        EngineDeadError: the engine has died, or is being closed.
    """
    task = asyncio.create_task(call)
    try:
        while not task.done():
            if llm.errored or is_closing():
                raise EngineDeadError
            await asyncio.wait([task], timeout=DEATH_POLL_SECONDS)
    except BaseException:
        task.cancel()
        raise
    return await task


async def prepared(llm: GuardedAsyncLLM) -> tuple[Bridge, str]:
    """Return vLLM's handlers and the model's task, once media and texts are guarded."""
    profile = llm.setup.profile
    llm.setup.parts.media.value(profile.media)
    most, single_bos = profile.limits.max_tokenize_length, profile.single_bos
    guard_lengths(llm.renderer, most, single_bos=single_bos)
    name_missing_places(llm.renderer.mm_processor)
    bridge = await Bridge.create(llm, llm.setup.arguments.namespace, profile)
    cache_environment()
    tasks = await llm.get_supported_tasks()
    for task in ("generate", "transcription"):
        if task in tasks:
            return bridge, task
    return bridge, str(llm.model_config.get_pooling_task(tasks))


class VllmClient:
    """A client of a running vLLM, started here or elsewhere; implements most of `Engine`."""

    def __init__(
        self, llm: GuardedAsyncLLM, bridge: Bridge, task: str, others: OtherClients | None = None
    ) -> None:
        self.max_model_len = int(llm.model_config.max_model_len)
        self.task = task  # what vLLM made of the model
        self.tokenizer: Any = llm.renderer.tokenizer  # not safe to share with a thread
        self.arguments = llm.setup.arguments.given  # as it was started
        self._others = others or OtherClients()
        self._llm = llm
        self.http = bridge
        self._openai = VllmOpenAI(bridge, llm.output_processor)
        self._jobs = JobRunner(llm, self._openai)
        self._tokenizer = PromptTokenizer(self.tokenizer)
        self._is_closing = False

    @property
    def openapi(self) -> Mapping[str, Any]:
        """The description that vLLM's application has of itself."""
        return self.http.app.openapi()

    @property
    def active_adapters(self) -> ActiveAdapters:
        """Nothing is known here of an engine that was started by another process."""
        return ActiveAdapters()

    async def read_adapters(self) -> None:
        """Do nothing: the process that started the engine asks its workers."""

    @property
    def running_requests(self) -> int:
        """Number of requests in the engine, and of calls such as loading an adapter."""
        own = int(self._llm.get_num_unfinished_requests()) + self._llm.calls.running
        return own + self._others.running_requests

    @property
    def progress(self) -> int:
        """Number of steps whose outputs have arrived, and of answered calls."""
        own = self._llm.output_processor.steps + self._llm.calls.answered
        return own + self._others.steps

    @property
    def not_finite(self) -> int:
        """Number of requests to the base model whose numbers were not finite."""
        return int(self._llm.output_processor.not_finite) + self._others.not_finite

    def generate(
        self, job: GenerationJob, direct: DirectChunks | None = None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of `job`; see `Engine.generate`."""
        return self._jobs.generate(job, direct)

    async def tokenize(self, text: str, *, add_special_tokens: bool) -> Sequence[PromptToken]:
        """Return the tokens of `text`; see `Engine.tokenize`."""
        guard: TextLengths = self._llm.renderer.tokenize_prompt_async
        adds = add_special_tokens and guard.starts.adds_special(text)
        return await self._tokenizer.tokenize(text, add_special_tokens=adds)

    def answer_openai(
        self, call: OpenAICall, direct: DirectEvents | None = None
    ) -> Coroutine[Any, Any, OpenAIReply]:
        """Answer with vLLM's own handlers; see `Engine.answer_openai`."""
        # The list of models asks no engine: it is the same while that is ended for a sleep.
        if self._llm.errored and call.kind != LIST_OF_MODELS:
            raise EngineDeadError
        return self._openai.answer(call, direct)

    def uncounted(self) -> AbstractContextManager[None]:
        """Leave what is asked in the body out of vLLM's metrics."""
        outputs = self._llm.output_processor
        is_alone = not outputs.request_states
        return outputs.uncounted.of_body(self._llm.logger_manager, is_alone=is_alone)

    async def sleep(self, level: int) -> None:
        """Give memory back by vLLM's own sleep mode; see `Engine.sleep`."""
        with our_errors():
            await self._while_alive(self._llm.calls.sleep(level))

    async def wake_up(self, level: int) -> None:
        """Take the memory back; see `Engine.wake_up`."""
        with our_errors():
            await self._while_alive(self._llm.calls.wake_up(level))

    async def _while_alive(self, call: Coroutine[Any, Any, None]) -> None:
        """Make a call of the engine; see `while_alive`."""
        await while_alive(self._llm, call, lambda: self._is_closing)

    async def check_health(self) -> None:
        """Raise EngineDeadError unless the engine is alive."""
        if self._llm.errored:
            raise EngineDeadError

    async def log_statistics(self) -> None:
        """Let vLLM log its line; with several client processes there is none."""
        await self._llm.do_log_stats()

    async def wait_until_dead(self) -> str:
        """Return what has ended, once the engine's process has ended without `close`."""
        while self._is_closing or not self._llm.errored:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(DEATH_POLL_SECONDS)
        self._llm.end_calls()
        return await self._reason()

    async def _reason(self) -> str:
        return ENGINE_DIED

    async def kill(self) -> bool:
        """Kill the engine's processes; vLLM notices that as after any other end."""
        has_ended = await in_own_thread(self._llm.kill, KILL_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait_until_dead(), LAST_ANSWER_SECONDS)
        if not self._llm.errored:
            self._llm.engine_died()
        return has_ended

    async def close(self) -> None:
        """End the engine's processes; waits for them at most `SHUTDOWN_SECONDS` each."""
        if self._is_closing:
            return
        self._is_closing = True
        release_environment()  # the next model may need other variables
        handler = self._llm.output_handler
        if handler is not None:
            if self._llm.errored:  # it still has to end every request
                await asyncio.wait([handler], timeout=LAST_ANSWER_SECONDS)
            handler.cancel()  # else it reports the requested end as a failure
            await asyncio.wait([handler])
        self._llm.end_calls()
        await asyncio.to_thread(self._llm.shutdown, SHUTDOWN_SECONDS)
        await asyncio.to_thread(self._llm.kill, KILL_SECONDS)  # vLLM kills, and leaves zombies
        self._llm.release()
        self._llm.clean_up()
        forget_tokenizers()
        self._llm.setup.thread.shutdown(wait=False)


class VllmEngine(VllmClient):
    """The real engine, in processes that were started here."""

    def __init__(
        self,
        llm: LeadingAsyncLLM,
        bridge: Bridge,
        task: str,
        clients: tuple[EngineClient, ...],
        processes: EngineProcesses,
    ) -> None:
        super().__init__(llm, bridge, task, clients[0].others if clients else None)
        self.adapters: EngineAdapters = llm.adapters
        self._processes = processes
        self._processes.watch(self._llm.engine_died)
        llm.folder.note_outside(self._processes.shared_memory())

    @property
    def active_adapters(self) -> ActiveAdapters:
        """The adapters that requests run on or wait for, also those of other clients."""
        return replace(self.adapters.active, model=str(self._llm.model_config.served_model_name))

    async def read_adapters(self) -> None:
        """Ask the workers which adapters they hold, if that may have changed."""
        await self._while_alive(self.adapters.read_resident())

    async def kill(self) -> bool:
        """Kill the engine's processes; whether they have ended includes its workers."""
        has_ended = await super().kill()
        return await in_own_thread(self._processes.wait_workers, KILL_SECONDS) and has_ended

    async def close(self) -> None:
        """End the engine's processes; a core that has lost a worker could only wait for it."""
        if self._processes.has_lost_a_worker:
            await in_own_thread(self._llm.kill, KILL_SECONDS)
        await super().close()
        await in_own_thread(self._processes.wait_workers, SHUTDOWN_SECONDS)
        self._processes.close()

    async def _reason(self) -> str:
        return await self._processes.reason()

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Load a private copy of the adapter and let OpenAI calls find it by name."""
        with our_errors():
            await self._while_alive(self.adapters.load(adapter))
        self.http.add_adapter(adapter)

    async def unload_adapter(self, adapter: AdapterRef) -> None:
        """Forget the adapter's name, then its weights."""
        self.http.remove_adapter(adapter)
        with our_errors():
            await self._while_alive(self.adapters.unload(adapter))

    @property
    def shared_adapters(self) -> tuple[LoadedAdapter, ...]:
        """The adapters in the engine, for its other clients."""
        return self.adapters.shared

    def hold_for_another(self, engine_id: int) -> AbstractAsyncContextManager[None]:
        """Keep an adapter usable for another client's request while the body runs."""
        return self.adapters.hold_for_another(engine_id)

    async def abort_for_another(self, engine_requests: Collection[str]) -> None:
        """End requests of another client; unknown ids are ignored."""
        if not self._llm.errored:
            await self._llm.engine_core.abort_requests_async(list(engine_requests))

    def complete(self, client: EngineClient) -> EngineClient:
        """Return the client with the facts that only a running engine knows."""
        stats: str | None = self._llm.engine_core.stats_update_address
        base = self.adapters.base
        return replace(client, stats_address=stats, base_adapter="" if base is None else base.path)
