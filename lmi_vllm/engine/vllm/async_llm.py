"""vLLM's `AsyncLLM` with guards before every request, for the first client of an engine and others.

The head of `adapters` and the modules in `workarounds` explain each guard. vLLM's engine core
serves as many clients as it has addresses; vLLM's `--api-server-count` uses that, too. The first
client starts the engine. It is a `GuardedAsyncLLM` and keeps what all clients share: the loaded
adapters, and those that may be in the engine together. The other clients (of the extra front_ends)
ask it, so one table decides for all.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Final

from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from lmi_vllm.checks.base_model import describe_base
from lmi_vllm.engine.private_folders import PrivateFolder, new_private_folder
from lmi_vllm.engine.vllm.adapters import EngineAdapters, UsableAdapters
from lmi_vllm.engine.vllm.engine_calls import EngineCalls, LoadedAdapter
from lmi_vllm.engine.vllm.outputs import EngineOutputs
from lmi_vllm.engine.vllm.workarounds import CPU_WORKER, has_name, is_needed, replace
from lmi_vllm.engine.vllm.workarounds.hostile_requests import GrammarGuard
from lmi_vllm.engine.vllm.workarounds.not_finite import REASON, is_marked_not_finite
from lmi_vllm.engine.vllm.workarounds.zero_adapter import load_zero_adapter
from lmi_vllm.errors import EngineStartError, LmiError
from lmi_vllm.messages import EngineSlot
from lmi_vllm.telemetry.records import current_record

KILL_POLL_SECONDS: Final = 0.01
LAUNCH: Final = "vllm.v1.engine.core_client:launch_core_engines"


class GuardedAsyncLLM(AsyncLLM):  # type: ignore[misc,unused-ignore]
    """AsyncLLM whose `generate` and `encode` refuse requests that could harm the engine."""

    adapters: UsableAdapters
    output_processor: EngineOutputs

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.output_processor = EngineOutputs.of(self.output_processor)
        self.calls = EngineCalls(self)
        self.adapters = EngineAdapters(self.calls)
        self.grammars: GrammarGuard | None = None
        self._sockets: PrivateFolder | None = None  # of the engine's processes
        self.has_prompt_logprobs = True

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the engine as AsyncLLM does, but not from a half torn down interpreter.

        The function is bound early: at the end of the interpreter this module's names are gone.
        """
        if not _is_finalizing():
            super().__del__()

    async def guard(self, adapter_bytes: int, *, is_cpu: bool) -> EngineAdapters:
        """Prepare for requests; on CPU with LoRA and a foreign worker, load the all-zero adapter.

        Raises:
            EngineStartError: no all-zero adapter fits this model, so base rows would be wrong.
        """
        self.has_prompt_logprobs = self._may_have_prompt_logprobs(is_cpu=is_cpu)
        config = self.vllm_config.lora_config
        if config is None:
            self.adapters = adapters = EngineAdapters(self.calls)
            return adapters
        folder = await asyncio.to_thread(new_private_folder, "lmi-vllm-adapters-")
        needs_zero_adapter = is_cpu and not self._has_our_worker and is_needed("zero_adapter")
        slots = config.max_loras - 1 if needs_zero_adapter else config.max_loras
        model = Path(self.model_config.model)
        base = await asyncio.to_thread(describe_base, model, (), config.max_lora_rank)
        self.adapters = adapters = EngineAdapters(
            self.calls, slots, folder, base.limit, adapter_bytes
        )
        if needs_zero_adapter:
            adapters.base = await load_zero_adapter(adapters.add, model, folder.path / "base")
            await self.calls.pin_adapter(adapters.base.engine_id)
        return adapters

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
        adapter = self._adapter(lora_request)
        if sampling_params.prompt_logprobs is not None and not self.has_prompt_logprobs:
            raise VLLMValidationError(
                "log probabilities of the prompt are not possible on CPU with enable_lora and "
                "another worker_cls or model runner than the default: vLLM's engine would end"
            )
        outputs: AsyncGenerator[Any, None] = super().generate(
            prompt,
            sampling_params,
            request_id,
            lora_request=_request_for(adapter),
            **_continued_trace(options),
        )
        if self.grammars and sampling_params.structured_outputs is not None:
            outputs = _checked(outputs, self.grammars, sampling_params)
        return self._with_slot(outputs, adapter, lora_request)

    def encode(  # type: ignore[override,unused-ignore]
        self, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.encode, with the guard of `generate`; NaN in the output is an error."""
        adapter = self._adapter(lora_request)
        outputs: AsyncGenerator[Any, None] = super().encode(
            *args, lora_request=_request_for(adapter), **_continued_trace(options)
        )
        return self._with_slot(_finite(outputs), adapter, lora_request)

    def kill(self, seconds: float) -> bool:
        """Kill the engine's processes; return whether they ended in time. Blocks."""
        resources = getattr(self.engine_core, "resources", None)
        processes = tuple(getattr(getattr(resources, "engine_manager", None), "processes", ()))
        for process in processes:
            process.kill()
        deadline = time.monotonic() + seconds
        # One look is not enough: while vLLM's own thread reaps a process, `join` returns at once,
        # and the process still counts as alive for a moment.
        while any(process.is_alive() for process in processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(KILL_POLL_SECONDS)
        return bool(processes)

    def engine_died(self) -> None:
        """End every request as vLLM does when it sees the engine's end."""
        client: Any = self.engine_core
        client.resources.engine_dead = True
        client.outputs_queue.put_nowait(VllmEngineDeadError())

    def release(self) -> None:
        """Release our folder, and what vLLM leaves to the garbage collector, after `shutdown`.

        The collector may not reach vLLM's descriptors for a long time (DECISIONS.md 42).
        """
        resources = getattr(self.engine_core, "resources", None)
        manager = getattr(resources, "engine_manager", None)
        for process in getattr(manager, "processes", ()):
            with contextlib.suppress(ValueError):  # it still runs and needs its pipe
                process.close()
        context = getattr(resources, "ctx", None)
        if context is not None:
            context.destroy(linger=0)

    def own_sockets(self, folder: PrivateFolder | None) -> None:
        """Remove the folder of the engine's sockets with the engine."""
        self._sockets = folder

    def clean_up(self) -> None:
        """Remove the private copies of all adapters, and the engine's sockets."""
        if self._sockets is not None:
            self._sockets.remove()
        if isinstance(self.adapters, EngineAdapters) and self.adapters.folder is not None:
            self.adapters.folder.remove()

    @property
    def _has_our_worker(self) -> bool:
        return bool(self.vllm_config.parallel_config.worker_cls == CPU_WORKER)

    def _may_have_prompt_logprobs(self, *, is_cpu: bool) -> bool:
        if not is_cpu or self.vllm_config.lora_config is None:
            return True
        return self._has_our_worker and not self.vllm_config.use_v2_model_runner

    def _adapter(self, lora_request: LoRARequest | None) -> LoadedAdapter | None:
        if lora_request is None:
            return self.adapters.base
        with _refused():
            return self.adapters.find(lora_request.lora_int_id, lora_request.lora_name)

    def _with_slot(
        self,
        outputs: AsyncGenerator[Any, None],
        adapter: LoadedAdapter | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[Any, None]:
        if adapter is None or lora_request is None or adapter is self.adapters.base:
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


def with_clients(
    slots: tuple[EngineSlot, ...],
) -> contextlib.AbstractContextManager[object]:
    """Let the engine that is started in the body serve these clients, too.

    Raises:
        EngineStartError: the installed vLLM starts its engines otherwise.
    """
    if not has_name(LAUNCH):
        raise EngineStartError(
            f"this vLLM has no {LAUNCH}: LMI_FRONTEND_PROCESSES cannot be more than 1 with it"
        )

    def with_addresses(launch: Any) -> Any:
        def launch_with_clients(
            config: Any, executor_class: Any, log_stats: bool, addresses: Any
        ) -> Any:
            addresses.inputs.extend(slot.input_address for slot in slots)
            addresses.outputs.extend(slot.output_address for slot in slots)
            return launch(config, executor_class, log_stats, addresses)

        return launch_with_clients

    return replace(LAUNCH, with_addresses)


@contextlib.contextmanager
def _refused() -> Any:
    """Raise vLLM's own error if an adapter cannot be used."""
    try:
        yield
    except LmiError as error:
        raise VLLMValidationError(error.text) from error


def _request_for(adapter: LoadedAdapter | None) -> LoRARequest | None:
    if adapter is None:
        return None
    return LoRARequest(adapter.name, adapter.engine_id, adapter.path)


async def _checked(
    outputs: AsyncGenerator[Any, None], grammars: GrammarGuard, params: Any
) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        record = current_record()
        source = "" if record is None else record.source
        await grammars.check(params.structured_outputs, params.max_tokens, source)
        async for output in outputs:
            yield output


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
