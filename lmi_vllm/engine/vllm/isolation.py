"""An `AsyncLLM` that no request and no adapter can kill or mix up (DECISIONS.md 9).

vLLM 0.32 breaks adapter isolation in known ways; each guard here names the one it is for:

- an adapter given to `generate()` that was never loaded, or failed to, kills the engine: only ids
  that `load` accepted get through;
- on CPU, base rows batched with adapter rows are computed with the adapter of the last slot: the
  worker is replaced (`vllm_cpu_worker`), and where it is not the engine has one slot more and base
  requests carry a pinned all-zero adapter in it;
- the scheduler does not count pinned slots: a step with more distinct adapters than free slots
  kills the engine, so requests wait here for a slot (`AdapterSlots`);
- an evicted adapter is read again inside the engine step, and a changed or missing folder kills
  the engine; the prefix cache is keyed by name and path: every load reads a private copy, which
  stays until the last request on it has ended;
- two loads of one name in one step count as one, and the engine ends: names are made unique;
- a failed load stays half usable under its id: it is removed, and ids are never used again;
- with every slot pinned, the next adapter kills the engine: it is refused here;
- on CPU with LoRA, prompt log probabilities beside any other request kill the engine: the worker is
  replaced (`vllm_cpu_worker`), and where it is not they are refused;
- a grammar may take minutes to compile, or seconds a token: `GrammarGuard` tries it before.
"""

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from lmi_vllm.engine.private_folders import PrivateFolder, new_private_folder
from lmi_vllm.engine.vllm.adapter_files import (
    copy_adapter,
    linear_layers,
    write_zero_adapter,
)
from lmi_vllm.engine.vllm.adapter_slots import AdapterSlots, NoSlotError, Slots
from lmi_vllm.engine.vllm.grammars import GrammarGuard
from lmi_vllm.engine.vllm.output import DirectOutputProcessor
from lmi_vllm.errors import AdapterCapacityError, AdapterRefusedError, EngineStartError
from lmi_vllm.messages import AdapterRef, SharedAdapter
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

CPU_WORKER: Final = "lmi_vllm.engine.vllm.cpu_worker.GuardedCpuWorker"
BASE_ADAPTER_NAME: Final = "lmi-vllm-base"
BASE_ADAPTER_ID: Final = 1  # the all-zero adapter; ids of users' adapters start above
PIN_WAIT_SECONDS: Final = 10.0  # for running requests to leave a slot free
_PIN_ATTEMPTS: Final = 3  # a step of the engine may evict the adapter between load and pin
_FAILURE_PREFIX: Final = "Call to add_lora method failed: "
_CAPACITY_MARKS: Final = (
    "No free lora slots",
    "greater than the number of GPU LoRA slots",
    "out of memory",
    "can't allocate memory",
)


class IsolatingAsyncLLM(AsyncLLM):  # type: ignore[misc,unused-ignore]
    """AsyncLLM with `load` and `unload` for adapters and a `generate` that guards them."""

    # AsyncLLM's constructor is called by its own factory: our state is added by `isolate`.
    _adapters: dict[int, LoRARequest]
    _names: dict[int, str]  # as users know them
    _base_lora: LoRARequest | None
    _slots: Slots
    _folder: PrivateFolder | None
    _has_prompt_logprobs: bool
    _grammars: GrammarGuard | None
    output_processor: DirectOutputProcessor

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the engine as AsyncLLM does, but not from a half torn down interpreter.

        The function is bound early: at the end of the interpreter this module's names are gone.
        """
        if not _is_finalizing():
            super().__del__()

    async def isolate(self, *, is_cpu: bool) -> None:
        """Prepare the guards; on CPU with LoRA and a foreign worker, load the all-zero adapter.

        Raises:
            EngineStartError: no all-zero adapter fits this model, so base rows would be wrong.
        """
        config = self.vllm_config.lora_config
        needs_zero_adapter = config is not None and is_cpu and not self._has_our_worker
        slots = config.max_loras if config else 0
        self._prepare(AdapterSlots(slots - 1 if needs_zero_adapter else slots), is_cpu=is_cpu)
        if config is None:
            return
        self._folder = await asyncio.to_thread(new_private_folder, "lmi-vllm-adapters-")
        if needs_zero_adapter:
            self._base_lora = await self._load_zero_adapter(self._folder.path / "base")

    @property
    def _has_our_worker(self) -> bool:
        return bool(self.vllm_config.parallel_config.worker_cls == CPU_WORKER)

    def _prepare(self, slots: Slots, *, is_cpu: bool) -> None:
        """Set up what every client of an engine has."""
        self.output_processor = DirectOutputProcessor.of(self.output_processor)
        self._slots, self._adapters, self._names = slots, {}, {}
        self._base_lora, self._folder, self._grammars = None, None, None
        has_lora = self.vllm_config.lora_config is not None
        self._has_prompt_logprobs = not (is_cpu and has_lora) or (
            self._has_our_worker and not self.vllm_config.use_v2_model_runner
        )

    def generate(  # type: ignore[override,unused-ignore]
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.generate; adapters that could harm the engine are refused."""
        shown = lora_request.lora_name if lora_request else ""
        lora_request = self._guarded(lora_request)
        if sampling_params.prompt_logprobs is not None and not self._has_prompt_logprobs:
            raise VLLMValidationError(
                "log probabilities of the prompt are not possible on CPU with enable_lora and "
                "another worker_cls or model runner than the default: vLLM's engine would end"
            )
        outputs: AsyncGenerator[Any, None] = super().generate(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            **_continued_trace(options),
        )
        if self._grammars and sampling_params.structured_outputs is not None:
            outputs = _checked(outputs, self._grammars, sampling_params)
        if lora_request is None or lora_request is self._base_lora:
            return outputs
        return self._held(outputs, lora_request, shown)

    def encode(  # type: ignore[override,unused-ignore]
        self, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.encode, with the guard of `generate`."""
        shown = lora_request.lora_name if lora_request else ""
        lora_request = self._guarded(lora_request)
        outputs: AsyncGenerator[Any, None] = super().encode(
            *args, lora_request=lora_request, **_continued_trace(options)
        )
        if lora_request is None or lora_request is self._base_lora:
            return outputs
        return self._held(outputs, lora_request, shown)

    async def load(self, adapter: AdapterRef) -> None:
        """Load a private copy of `adapter`, once, and let `generate` use it; pin it if so asked.

        Raises:
            AdapterRefusedError: in the engine's words; nothing of the adapter stays.
            AdapterCapacityError: no slot is left for it.
        """
        if self._folder is None:
            raise AdapterRefusedError("LoRA is not enabled.")
        is_new = adapter.engine_id not in self._adapters
        if not is_new and self._names[adapter.engine_id] != adapter.name:
            raise AdapterRefusedError(f"engine id {adapter.engine_id} belongs to another adapter")
        if self._slots.is_all_pinned and (is_new or not self._slots.is_pinned(adapter.engine_id)):
            raise self._no_slot(adapter.name)
        if is_new:
            # A path never used before: it is half of the prefix cache's key.
            await self._load_copy(adapter, Path(tempfile.mkdtemp(dir=self._folder.path)))
        if not adapter.pinned:
            return
        try:
            await self._pin(adapter)
        except BaseException:
            if is_new:
                await self.unload(adapter)
            raise

    async def unload(self, adapter: AdapterRef) -> None:
        """Remove the adapter and its private copy, after its last request; ignores unknown ids."""
        request = self._adapters.pop(adapter.engine_id, None)
        if request is None:
            return
        self._names.pop(adapter.engine_id, None)
        self._slots.unpin(adapter.engine_id)
        if not self._slots.running(adapter.engine_id):
            await self._forget(request)

    @contextlib.asynccontextmanager
    async def hold_for_another(self, engine_id: int) -> AsyncIterator[None]:
        """Keep an adapter usable for a request of another client of this engine.

        Raises:
            AdapterRefusedError: it is not loaded.
            AdapterCapacityError: no slot is left for it.
        """
        request = self._adapters.get(engine_id)
        if request is None:
            raise AdapterRefusedError("The adapter is not loaded")
        try:
            async with self._slots.hold(engine_id):
                if engine_id not in self._adapters:  # removed while this one waited
                    raise AdapterRefusedError("The adapter is not loaded")
                yield
        except NoSlotError:
            raise self._no_slot(self._names.get(engine_id, "")) from None
        finally:
            await self._forget_if_unused(request)

    @property
    def shared_adapters(self) -> tuple[SharedAdapter, ...]:
        """The loaded adapters, as other clients have to name them to the engine."""
        return tuple(
            SharedAdapter(number, request.lora_name, request.lora_path)
            for number, request in self._adapters.items()
        )

    @property
    def base_adapter(self) -> str:
        """The path of the all-zero adapter that base requests carry; empty without one."""
        return "" if self._base_lora is None else str(self._base_lora.lora_path)

    def guard_grammars(self, grammars: GrammarGuard) -> None:
        """Let `generate` try each new grammar before the engine sees it."""
        self._grammars = grammars

    def release(self) -> None:
        """Give back, after `shutdown`, the descriptors that vLLM leaves to the garbage collector.

        It may not look at them for long (DECISIONS.md 42).
        """
        resources = getattr(self.engine_core, "resources", None)
        manager = getattr(resources, "engine_manager", None)
        for process in getattr(manager, "processes", ()):
            with contextlib.suppress(ValueError):  # it runs still: its pipe is needed
                process.close()
        context = getattr(resources, "ctx", None)
        if context is not None:
            context.destroy(linger=0)

    def clean_up(self) -> None:
        """Remove the private copies of all adapters."""
        folder: PrivateFolder | None = getattr(self, "_folder", None)  # none before `isolate`
        if folder is not None:
            folder.remove()

    def _guarded(self, lora_request: LoRARequest | None) -> LoRARequest | None:
        if lora_request is None:
            return self._base_lora
        known = self._adapters.get(lora_request.lora_int_id)
        if known is None:
            raise VLLMValidationError(f"The adapter {lora_request.lora_name} is not loaded")
        if self._slots.is_all_pinned and not self._slots.is_pinned(known.lora_int_id):
            raise VLLMValidationError(self._no_slot(lora_request.lora_name).text)
        return known

    async def _held(
        self, outputs: AsyncGenerator[Any, None], request: LoRARequest, shown: str
    ) -> AsyncGenerator[Any, None]:
        """Yield `outputs` while their adapter has a slot; the last one of a removed adapter cleans.

        The order matters: the request is out of the engine before its slot is free.
        """
        try:
            async with contextlib.AsyncExitStack() as held:
                await held.enter_async_context(self._slots.hold(request.lora_int_id))
                await held.enter_async_context(contextlib.aclosing(outputs))
                self._guarded(request)  # it may have been removed while this one waited
                async for output in outputs:
                    if output.finished:  # out of the engine: whoever reads slowly holds no slot
                        await held.aclose()
                    yield output
        except NoSlotError:
            raise VLLMValidationError(self._no_slot(shown).text) from None
        finally:
            await self._forget_if_unused(request)

    async def _forget_if_unused(self, request: LoRARequest) -> None:
        is_loaded = request.lora_int_id in self._adapters
        if not is_loaded and not self._slots.running(request.lora_int_id):
            await self._forget(request)

    async def _forget(self, request: LoRARequest) -> None:
        """Drop the weights and the private copy; a request that ran may have loaded them again."""
        if not self.errored:
            await self.remove_lora(request.lora_int_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    async def _load_copy(self, adapter: AdapterRef, private: Path) -> None:
        try:
            await asyncio.to_thread(copy_adapter, Path(adapter.path), private)
        except NotADirectoryError as error:
            raise AdapterRefusedError(
                f"Only local LoRA models are supported. {adapter.path} is not a valid path"
            ) from error
        except OSError as error:
            shutil.rmtree(private, ignore_errors=True)
            raise AdapterRefusedError(f"Adapter {adapter.name} cannot be read: {error}") from error
        except AdapterRefusedError:
            shutil.rmtree(private, ignore_errors=True)
            raise
        # vLLM compares adapters by name alone: of two loads of one name in one step it would
        # activate one, and end at the rows of the other.
        name = f"{adapter.name}@{adapter.engine_id}"
        request = LoRARequest(name, adapter.engine_id, str(private))
        await self._add(request, adapter)
        self._adapters[adapter.engine_id] = request
        self._names[adapter.engine_id] = adapter.name

    async def _add(self, request: LoRARequest, shown: AdapterRef) -> None:
        try:
            await self.add_lora(request)
        except Exception as error:  # vLLM raises a bare Exception here
            if self.errored:
                raise
            # After a shape error the id stays usable, half loaded.
            await self._forget(request)
            reason = str(error).removeprefix(_FAILURE_PREFIX)
            reason = reason.replace(request.lora_path, shown.path)
            reason = reason.replace(request.lora_name, shown.name)
            text = f"Adapter {shown.name} cannot be loaded: {reason}"
            is_full = any(mark in reason for mark in _CAPACITY_MARKS)
            raise (AdapterCapacityError if is_full else AdapterRefusedError)(text) from error

    async def _pin(self, adapter: AdapterRef) -> None:
        if self._slots.is_pinned(adapter.engine_id):
            return
        try:
            await self._slots.pin(adapter.engine_id, PIN_WAIT_SECONDS)
        except NoSlotError:
            raise AdapterCapacityError(
                f"Adapter {adapter.name} cannot be pinned: No free lora slots, all "
                f"{self._slots.count} are pinned or in use"
            ) from None
        try:
            await self._pin_in_engine(adapter)
        except BaseException:
            self._slots.unpin(adapter.engine_id)
            raise

    async def _pin_in_engine(self, adapter: AdapterRef) -> None:
        request = self._adapters[adapter.engine_id]
        for attempt in range(_PIN_ATTEMPTS):
            try:
                await self.add_lora(request)
                await self.pin_lora(adapter.engine_id)
            except Exception as error:  # vLLM raises a bare Exception here
                if self.errored:
                    raise
                if attempt + 1 < _PIN_ATTEMPTS and "is not registered" in str(error):
                    continue
                raise AdapterCapacityError(
                    f"Adapter {adapter.name} cannot be pinned: {error}"
                ) from error
            return

    def _no_slot(self, name: str) -> AdapterCapacityError:
        return AdapterCapacityError(
            f"No free lora slots for adapter {name}: all {self._slots.count} are pinned"
        )

    async def _load_zero_adapter(self, folder: Path) -> LoRARequest:
        for module, rows, columns in linear_layers(Path(self.model_config.model)):
            write_zero_adapter(folder, module, rows, columns)
            request = LoRARequest(BASE_ADAPTER_NAME, BASE_ADAPTER_ID, str(folder))
            try:
                await self._add(request, AdapterRef("base", str(folder), BASE_ADAPTER_ID))
            except AdapterRefusedError as error:
                logger.debug("no all-zero adapter on %s: %s", module, error)
                continue
            await self.pin_lora(BASE_ADAPTER_ID)
            return request
        raise EngineStartError(
            "enable_lora on CPU: no linear layer was found for the all-zero adapter that keeps "
            "base answers apart from adapters' (a vLLM bug on CPU); start without enable_lora"
        )


async def _checked(
    outputs: AsyncGenerator[Any, None], grammars: GrammarGuard, params: Any
) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        await grammars.check(params.structured_outputs, params.max_tokens)
        async for output in outputs:
            yield output


def _continued_trace(options: dict[str, Any]) -> dict[str, Any]:
    """Put the engine's span below ours, whatever vLLM's handler took from the client's headers."""
    record = current_record()
    if record is None or record.trace_headers is None:
        return options
    return {**options, "trace_headers": dict(record.trace_headers)}  # it is serialised
