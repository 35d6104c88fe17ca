"""vLLM's `AsyncLLM` with guards before every request, for the first client of an engine and others.

What each guard is for is said at the head of `adapters` and of the modules in `workarounds`.

vLLM's engine core serves as many clients as it is given addresses; its own `--api-server-count`
works so. The first client, which starts the engine, is a `LeadingAsyncLLM` and keeps what all of
them share: which adapters are loaded, and which may be in the engine together. The others
(of the feature front_ends) ask it, so that one table decides for all.
"""

import asyncio
import contextlib
import functools
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from vllm.exceptions import GenerationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import EngineZmqAddresses, launch_core_engines
from vllm.v1.executor import Executor

from lmi_vllm.checks.base_model import describe_base
from lmi_vllm.engine.base import GRAMMAR_FAULT, GRAMMAR_SOURCE, CheckGrammar, EngineClient
from lmi_vllm.engine.deaths import OomKills
from lmi_vllm.engine.turns import TurnBudget
from lmi_vllm.engine.vllm.adapters import EngineAdapters, UsableAdapters
from lmi_vllm.engine.vllm.client_parts import EngineParts
from lmi_vllm.engine.vllm.configuration import VllmArguments
from lmi_vllm.engine.vllm.cpu.scored_tokens import fault_beside_drafts
from lmi_vllm.engine.vllm.cpu.zero_adapter import load_zero_adapter
from lmi_vllm.engine.vllm.engine_calls import EngineCalls, LoadedAdapter
from lmi_vllm.engine.vllm.names import (
    GracefulHTTPError,
    LoRARequest,
    VllmEngineDeadError,
    VLLMValidationError,
    to_lora_request,
)
from lmi_vllm.engine.vllm.outputs import EngineOutputs, may_be_used
from lmi_vllm.engine.vllm.workarounds import CPU_WORKER, Scope, apply, is_needed
from lmi_vllm.engine.vllm.workarounds.bad_words import forbid_with_a_blank
from lmi_vllm.engine.vllm.workarounds.lost_cores import CoreWatch
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON, is_marked_not_finite
from lmi_vllm.engine.vllm.workarounds.parsers import check_reasoning
from lmi_vllm.engine.vllm.workarounds.profiler_thread import OneThread
from lmi_vllm.engine.vllm.workarounds.unsent_requests import UNSENDABLE, fault_of, unsent
from lmi_vllm.errors import AdapterCapacityError, Fault, LmiError
from lmi_vllm.messages import ServingProfile
from lmi_vllm.private_folders import PrivateFolder, new_private_folder
from lmi_vllm.telemetry.records import current_record

KILL_POLL_SECONDS: Final = 0.01
VLLM_MONITOR: Final = "MPClientEngineMonitor"  # vLLM's thread that waits for the engine's end
MONITOR_SECONDS: Final = 1.0
_OF_SERVER: Final = (Fault.ENGINE, Fault.NOT_READY, Fault.DEADLINE)  # faults
REQUESTS_IN_A_TURN: Final = 64  # that enter in one turn of the event loop: 15 ms


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is started or joined with."""

    arguments: VllmArguments
    config: Any  # vLLM's configuration, which it makes of them
    profile: ServingProfile
    thread: ThreadPoolExecutor  # its one thread is the parent of the engine's processes
    is_cpu: bool
    parts: EngineParts
    oom_kills: OomKills = field(default_factory=OomKills)  # since the start


class GuardedAsyncLLM(AsyncLLM):  # type: ignore[misc,unused-ignore]
    """AsyncLLM whose `generate` and `encode` let through nothing that could harm the engine.

    Its constructor blocks until the engine is there; `client` is what AsyncLLM takes of a client.
    """

    adapters: UsableAdapters
    output_processor: EngineOutputs
    profiler: Any  # vLLM's, or None

    def __init__(
        self,
        setup: EngineSetup,
        client: dict[str, Any],
        began: Callable[[str], None] | None = None,
    ) -> None:
        with apply(Scope.CLIENT):
            super().__init__(
                setup.config,
                Executor.get_class(setup.config),
                log_stats=not setup.arguments.namespace.disable_log_stats,
                log_requests=setup.arguments.namespace.enable_log_requests,
                **client,
            )
        if self.profiler is not None:
            self.profiler = OneThread(self.profiler)
        self.setup = setup
        self.calls = EngineCalls(self)
        has_lane = setup.profile.has_token_lane and may_be_used(self.model_config)
        lane = setup.parts.token_lane.value(self.output_processor.tokenizer) if has_lane else None
        self.output_processor = EngineOutputs.of(self.output_processor, lane, began)
        if lane is not None:
            lane.read_messages(self.engine_core.decoder)
        seconds = setup.profile.limits.grammar_timeout
        # None: LMI_GRAMMAR_TIMEOUT=0 serves grammars untried.
        make = setup.parts.grammar_trials.value
        self.check_grammar = make(self, seconds, setup.thread) if seconds else None
        self._turn = TurnBudget(REQUESTS_IN_A_TURN)
        self._has_silent_ends = is_needed("silent_ends")

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the engine as AsyncLLM does, but not from a half torn down interpreter.

        The function is bound early: at the end of the interpreter this module's names are gone.
        """
        if not _is_finalizing():
            super().__del__()

    def generate(  # type: ignore[override,unused-ignore]
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.generate; refuses adapters that could harm the engine."""
        adapter = self.adapters.base if lora_request is None else self._adapter(lora_request)
        if sampling_params.prompt_logprobs is not None:
            self._check_prompt_logprobs(prompt, sampling_params)
        is_bound = sampling_params.structured_outputs is not None
        if is_bound:
            check_reasoning(self, prompt, options)
        outputs: AsyncGenerator[Any, None] = super().generate(
            prompt,
            sampling_params,
            request_id,
            lora_request=adapter and to_lora_request(adapter),
            **_continued_trace(options),
        )
        if is_bound:
            outputs = _bound(outputs, self.check_grammar, sampling_params)
        if lora_request is not None:
            outputs = self._with_slot(outputs, adapter, lora_request)
        return _told_again(outputs) if self._has_silent_ends else outputs

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *arguments: Any, **named: Any
    ) -> Any:
        """As AsyncLLM.add_request; see `workarounds.unsent_requests` and `unsent_media`."""
        if fault := fault_of(request_id, params) or fault_beside_drafts(params, self.vllm_config):
            raise VLLMValidationError(fault)
        await self._turn.wait(1)
        try:
            added = await super().add_request(request_id, prompt, params, *arguments, **named)
        except UNSENDABLE as error:
            raise VLLMValidationError(unsent(error, params, named)) from error
        if (note_sent := getattr(self.renderer.mm_processor_cache, "note_sent", None)) is not None:
            note_sent(prompt)
        return added

    async def _add_request(self, request: Any, *arguments: Any, **named: Any) -> None:
        """As AsyncLLM._add_request; a failure leaves nothing of this request in vLLM's tables."""
        if getattr(request.sampling_params, "bad_words", None) and self.tokenizer is not None:
            forbid_with_a_blank(request.sampling_params, self.tokenizer)
        try:
            await super()._add_request(request, *arguments, **named)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    def encode(  # type: ignore[override,unused-ignore]
        self, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.encode, with the guard of `generate`; NaN in the output is an error."""
        adapter = self.adapters.base if lora_request is None else self._adapter(lora_request)
        outputs: AsyncGenerator[Any, None] = super().encode(
            *args, lora_request=to_lora_request(adapter), **_continued_trace(options)
        )
        if lora_request is None:
            return _finite(outputs)
        return self._with_slot(_finite(outputs), adapter, lora_request)

    def kill(self, seconds: float) -> bool:
        """Kill the engine's processes; return whether they ended in time. Blocks."""
        processes = engine_processes(self)
        for process in processes:
            process.kill()
        deadline = time.monotonic() + seconds
        # One look is not enough: while vLLM's own thread reaps a process, `join` returns at once,
        # and the process still counts as alive for a moment.
        while any(process.is_alive() for process in processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(KILL_POLL_SECONDS)
        for thread in threading.enumerate():
            if thread.name == VLLM_MONITOR:  # it still asks for the exit codes
                thread.join(MONITOR_SECONDS)
        return bool(processes)

    def engine_died(self) -> None:
        """End every request as vLLM does when it sees the engine's end."""
        client: Any = self.engine_core
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(VllmEngineDeadError())
        self.end_calls()

    def end_calls(self) -> None:
        """Fail the calls that wait for the engine; vLLM leaves them waiting after its end."""
        waiting: dict[int, asyncio.Future[Any]] = self.engine_core.utility_results
        while waiting:
            _, call = waiting.popitem()
            if not call.done():
                call.set_exception(VllmEngineDeadError())

    def release(self) -> None:
        """Release our folder, and what vLLM leaves to the garbage collector, after `shutdown`.

        The collector may not reach vLLM's descriptors for a long time (DECISIONS.md 42).
        """
        resources = getattr(self.engine_core, "resources", None)
        for process in engine_processes(self):
            with contextlib.suppress(ValueError):  # it still runs and needs its pipe
                process.close()
        context = getattr(resources, "ctx", None)
        if context is not None:
            context.destroy(linger=0)

    def clean_up(self) -> None:
        """Remove what is this client's own on disk: by itself nothing."""

    @property
    def _has_our_worker(self) -> bool:
        return bool(self.vllm_config.parallel_config.worker_cls == CPU_WORKER)

    @functools.cached_property
    def _has_prompt_logprobs(self) -> bool:
        if not self.setup.is_cpu or self.vllm_config.lora_config is None:
            return True
        return self._has_our_worker and not self.vllm_config.use_v2_model_runner

    def _check_prompt_logprobs(self, prompt: Any, params: Any) -> None:
        """Refuse more of them than vLLM may write without a pause.

        Raises:
            VLLMValidationError: there would be too many, or none are possible.
        """
        if not self._has_prompt_logprobs:
            raise VLLMValidationError(
                "log probabilities of the prompt are not possible on CPU with enable_lora and "
                "another worker_cls or model runner than the default: vLLM's engine would end"
            )
        wanted = params.prompt_logprobs
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        each = int(self.model_config.get_vocab_size()) if wanted < 0 else wanted + 1
        count, most = each * len(ids or ()), self.setup.profile.limits.max_prompt_logprobs
        count *= max(params.n or 1, 1)  # vLLM repeats them for each answer
        if (record := current_record()) is not None:
            record.prompt_logprobs += count
            count = record.prompt_logprobs
        if count > most:
            raise VLLMValidationError(
                f"log probabilities of the prompt: at most {most} (LMI_MAX_PROMPT_LOGPROBS), for "
                f"each token as many as prompt_logprobs (with echo: logprobs) and one; got {count}"
            )

    def _adapter(self, lora_request: LoRARequest) -> LoadedAdapter:
        with _refused():
            return self.adapters.find(lora_request.lora_int_id, lora_request.lora_name)

    def _with_slot(
        self,
        outputs: AsyncGenerator[Any, None],
        adapter: LoadedAdapter | None,
        lora_request: LoRARequest,
    ) -> AsyncGenerator[Any, None]:
        if adapter is None or adapter is self.adapters.base:
            return outputs
        return self._held(outputs, adapter, lora_request.lora_name)

    async def _held(
        self, outputs: AsyncGenerator[Any, None], adapter: LoadedAdapter, shown: str
    ) -> AsyncGenerator[Any, None]:
        """Yield `outputs` while their adapter has a slot; clean up if the adapter was removed.

        The order matters: the request is out of the engine before its slot is free.
        """
        try:
            async with contextlib.AsyncExitStack() as held:
                with _refused():
                    await held.enter_async_context(self.adapters.hold(adapter, shown))
                await held.enter_async_context(contextlib.aclosing(outputs))
                with _refused():  # it may have been removed while this request waited
                    self.adapters.find(adapter.engine_id, adapter.name)
                async for output in outputs:
                    if output.finished:  # it has left the engine: a slow reader holds no slot
                        await held.aclose()
                    yield output
        finally:
            await self.adapters.release(adapter)


class LeadingAsyncLLM(GuardedAsyncLLM):
    """The first client, which starts the engine and keeps its adapters.

    `clients` are those of the engine if there are several; this one is the first. `folder` has the
    sockets of the engine's processes, and is removed with the engine.
    """

    adapters: EngineAdapters

    def __init__(
        self, setup: EngineSetup, clients: tuple[EngineClient, ...], folder: PrivateFolder
    ) -> None:
        with contextlib.ExitStack() as undone:
            with CoreWatch() as watch:
                launch = _launched(setup, clients, undone, watch) if clients else None
                super().__init__(setup, {} if launch is None else _first_client(clients, launch))
            undone.callback(self.shutdown)
            if launch is not None:  # vLLM's client watches and ends what it has started itself
                self.engine_core.resources.engine_manager = launch.engine_manager
                self.engine_core.resources.coordinator = launch.coordinator
                self.engine_core.start_engine_core_monitor()
            self.adapters = self._new_adapters()
            undone.pop_all()
        self.folder = folder

    def _new_adapters(self) -> EngineAdapters:
        config = self.vllm_config.lora_config
        if config is None:
            return EngineAdapters(self.calls, self.setup.parts.pickled_weights.value)
        folder = new_private_folder("lmi-vllm-adapters-")
        slots = config.max_loras - 1 if self._needs_zero_adapter else config.max_loras
        base = describe_base(Path(self.model_config.model), (), config.max_lora_rank)
        most_bytes, roots = self.setup.profile.max_adapter_size, self.setup.profile.adapter_roots
        convert = self.setup.parts.pickled_weights.value
        return EngineAdapters(self.calls, convert, slots, folder, base, most_bytes, roots)

    @property
    def _needs_zero_adapter(self) -> bool:
        has_defect = self.setup.is_cpu and not self._has_our_worker and is_needed("zero_adapter")
        return has_defect and self.vllm_config.lora_config is not None

    async def keep_base_rows_apart(self) -> None:
        """Load the all-zero adapter where base rows need it: on CPU, with LoRA, a foreign worker.

        Raises:
            EngineStartError: none fits this model, so base rows would be wrong.
        """
        if self._needs_zero_adapter and (folder := self.adapters.folder) is not None:
            model = Path(self.model_config.model)
            await load_zero_adapter(self.adapters.add_base, model, folder.path / "base")

    def clean_up(self) -> None:
        """Remove the private copies of all adapters, and the engine's folder."""
        for folder in (self.folder, self.adapters.folder):
            if folder is not None:
                folder.remove()


def engine_processes(llm: Any) -> tuple[Any, ...]:
    """Return the processes of the engine's cores that were started here, as Python has them."""
    resources = getattr(llm.engine_core, "resources", None)
    return tuple(getattr(getattr(resources, "engine_manager", None), "processes", ()))


def client_of(client: EngineClient) -> dict[str, Any]:
    """Return what AsyncLLM takes of one of several clients."""
    addresses = {
        "input_address": client.input_address,
        "output_address": client.output_address,
        "stats_update_address": client.stats_address,
    }
    return {
        "client_addresses": addresses,
        "client_count": client.count,
        "client_index": client.index,
    }


def _first_client(clients: tuple[EngineClient, ...], launch: Any) -> dict[str, Any]:
    stats = launch.addresses.frontend_stats_publish_address
    options = client_of(replace(clients[0], stats_address=stats))
    options["client_addresses"]["tensor_queue"] = launch.tensor_queue
    return options


def _launched(
    setup: EngineSetup,
    clients: tuple[EngineClient, ...],
    undone: contextlib.ExitStack,
    watch: CoreWatch,
) -> Any:
    """Start an engine for these clients, as vLLM does for its own --api-server-count."""
    addresses = EngineZmqAddresses(
        inputs=[client.input_address for client in clients],
        outputs=[client.output_address for client in clients],
    )
    executor = Executor.get_class(setup.config)
    log_stats = not setup.arguments.namespace.disable_log_stats
    with launch_core_engines(setup.config, executor, log_stats, addresses) as launch:
        watch.note("engine_manager", launch.engine_manager)
        for part in (launch.engine_manager, launch.coordinator):
            if part is not None:
                undone.callback(part.shutdown)
    return launch


@contextlib.contextmanager
def _refused() -> Any:
    """Raise vLLM's own error if an adapter cannot be used; 5xx where no client is to blame."""
    try:
        yield
    except AdapterCapacityError as error:
        if (record := current_record()) is not None:
            record.retry_after_seconds = error.retry_after_seconds
        raise GracefulHTTPError(error.text, HTTPStatus.SERVICE_UNAVAILABLE) from error
    except LmiError as error:
        if error.fault in _OF_SERVER:  # the engine has died while its first process was asked
            raise GracefulHTTPError(error.text, HTTPStatus(error.fault.status)) from error
        raise VLLMValidationError(error.text) from error


async def _bound(
    outputs: AsyncGenerator[Any, None], check_grammar: CheckGrammar | None, params: Any
) -> AsyncGenerator[Any, None]:
    """Yield what is bound by a grammar; the client is told where that is to blame for the end."""
    async with contextlib.aclosing(outputs):
        if check_grammar is not None:
            record = current_record()
            source = "" if record is None else record.source
            await check_grammar(params.structured_outputs, params.max_tokens, source)
            params.extra_args = {**(params.extra_args or {}), GRAMMAR_SOURCE: source}
        async for output in outputs:
            for completion in output.outputs:
                reason = completion.stop_reason
                if completion.finish_reason == "error" and str(reason).startswith(GRAMMAR_FAULT):
                    raise VLLMValidationError(reason)
            yield output


async def _told_again(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield outputs; raise after one that ended with an error if the reader goes on.

    Streams of vLLM 0.31 leave out what ends before its first token, without a look at the reason.
    """
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            yield output
            if any(completion.finish_reason == "error" for completion in output.outputs):
                raise GenerationError("Internal server error")  # as vLLM 0.32 does


async def _finite(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if is_marked_not_finite(output.outputs.data):
                raise GenerationError(REASON)
            yield output


def _continued_trace(options: dict[str, Any]) -> dict[str, Any]:
    """Make the engine's span a child of the server's, whatever the client's headers are."""
    record = current_record()
    if record is None or record.trace_headers is None:
        return options
    return {**options, "trace_headers": dict(record.trace_headers)}  # it is serialised
