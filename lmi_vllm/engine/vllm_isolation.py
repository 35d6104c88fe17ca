"""An `AsyncLLM` that no request and no adapter can kill or mix up (DECISIONS.md 9).

vLLM 0.32 breaks adapter isolation in known ways; each guard here names the one it is for:

- an adapter given to `generate()` that was never loaded, or failed to, kills the engine: only ids
  that `load` accepted get through;
- on CPU, base rows batched with adapter rows are computed with the adapter of the last slot: the
  engine has one slot more and base requests carry a pinned all-zero adapter in it;
- an evicted adapter is read again inside the engine step, and a changed or missing folder kills
  the engine; the prefix cache is keyed by name and path: every load reads a private copy;
- a failed load stays half usable under its id: it is removed, and ids are never used again;
- with every slot pinned, the next adapter kills the engine: it is refused here;
- on CPU with LoRA, two requests with prompt log probabilities at once kill the engine: they queue.
"""

import asyncio
import json
import logging
import shutil
import struct
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from lmi_vllm.errors import AdapterCapacityError, AdapterRefusedError, EngineStartError
from lmi_vllm.messages import AdapterRef

logger = logging.getLogger(__name__)

BASE_ADAPTER_ID: Final = 1  # the all-zero adapter; ids of users' adapters start above
_FAILURE_PREFIX: Final = "Call to add_lora method failed: "
_CAPACITY_MARKS: Final = ("No free lora slots", "greater than the number of GPU LoRA slots")
# Linear layers of the architectures we know, most common first; one that exists is enough.
_ZERO_MODULES: Final = (
    "q_proj", "qkv_proj", "query_key_value", "c_attn", "wqkv", "W_pack", "o_proj", "dense",
    "down_proj", "fc1",
)  # fmt: skip


class IsolatingAsyncLLM(AsyncLLM):  # type: ignore[misc,unused-ignore]
    """AsyncLLM with `load` and `unload` for adapters and a `generate` that guards them."""

    # AsyncLLM's constructor is called by its own factory: our state is added by `isolate`.
    _adapters: dict[int, LoRARequest]
    _pinned: set[int]
    _base_lora: LoRARequest | None
    _slots: int
    _folder: Path | None
    _prompt_logprobs_turn: asyncio.Lock | None

    def __del__(self) -> None:
        """End the engine as AsyncLLM does, but not from a half torn down interpreter."""
        if not sys.is_finalizing():
            super().__del__()

    async def isolate(self, *, is_cpu: bool) -> None:
        """Prepare the guards; on CPU with LoRA, load the all-zero adapter.

        Raises:
            EngineStartError: no all-zero adapter fits this model, so base rows would be wrong.
        """
        self._adapters, self._pinned = {}, set()
        self._base_lora, self._folder, self._prompt_logprobs_turn = None, None, None
        config = self.vllm_config.lora_config
        self._slots = config.max_loras if config else 0
        if config is None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="lmi-vllm-adapters-"))
        if is_cpu:
            self._slots -= 1
            self._prompt_logprobs_turn = asyncio.Lock()
            self._base_lora = await self._load_zero_adapter(self._folder / "base")

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
        lora_request = self._guarded(lora_request)
        outputs: AsyncGenerator[Any, None] = super().generate(
            prompt, sampling_params, request_id, lora_request=lora_request, **options
        )
        if self._prompt_logprobs_turn and sampling_params.prompt_logprobs is not None:
            return self._in_turn(outputs, self._prompt_logprobs_turn)
        return outputs

    def encode(  # type: ignore[override,unused-ignore]
        self, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM.encode, with the guard of `generate`."""
        outputs: AsyncGenerator[Any, None] = super().encode(
            *args, lora_request=self._guarded(lora_request), **options
        )
        return outputs

    async def load(self, adapter: AdapterRef) -> None:
        """Load a private copy of `adapter` and let `generate` use it.

        Raises:
            AdapterRefusedError: in the engine's words; nothing of the adapter stays.
            AdapterCapacityError: no slot is left for it.
        """
        if self._folder is None:
            raise AdapterRefusedError("LoRA is not enabled.")
        if len(self._pinned) >= self._slots:
            raise AdapterCapacityError(
                f"No free lora slots for adapter {adapter.name}: all {self._slots} are pinned"
            )
        private = self._folder / str(adapter.engine_id)
        try:
            await asyncio.to_thread(_copy_adapter, Path(adapter.path), private)
        except NotADirectoryError as error:
            raise AdapterRefusedError(
                f"Only local LoRA models are supported. {adapter.path} is not a valid path"
            ) from error
        except OSError as error:
            shutil.rmtree(private, ignore_errors=True)
            raise AdapterRefusedError(f"Adapter {adapter.name} cannot be read: {error}") from error
        request = LoRARequest(adapter.name, adapter.engine_id, str(private))
        await self._add(request, shown_path=adapter.path)
        self._adapters[adapter.engine_id] = request
        if adapter.pinned:
            await self._pin(adapter)

    async def unload(self, adapter: AdapterRef) -> None:
        """Remove the adapter and its private copy; unknown ids are ignored."""
        request = self._adapters.pop(adapter.engine_id, None)
        if request is None:
            return
        self._pinned.discard(adapter.engine_id)
        if not self.errored:
            await self.remove_lora(adapter.engine_id)
        await asyncio.to_thread(shutil.rmtree, request.lora_path, ignore_errors=True)

    def clean_up(self) -> None:
        """Remove the private copies of all adapters."""
        if getattr(self, "_folder", None):
            shutil.rmtree(self._folder, ignore_errors=True)  # type: ignore[arg-type]

    def _guarded(self, lora_request: LoRARequest | None) -> LoRARequest | None:
        if lora_request is None:
            return self._base_lora
        known = self._adapters.get(lora_request.lora_int_id)
        if known is None:
            raise VLLMValidationError(f"The adapter {lora_request.lora_name} is not loaded")
        if lora_request.lora_int_id not in self._pinned and len(self._pinned) >= self._slots:
            raise VLLMValidationError(
                f"No free lora slots for adapter {lora_request.lora_name}: "
                f"all {self._slots} are pinned"
            )
        return known

    async def _in_turn(
        self, outputs: AsyncGenerator[Any, None], turn: asyncio.Lock
    ) -> AsyncGenerator[Any, None]:
        async with turn:
            try:
                async for output in outputs:
                    yield output
            finally:
                await outputs.aclose()

    async def _add(self, request: LoRARequest, shown_path: str) -> None:
        try:
            await self.add_lora(request)
        except Exception as error:  # vLLM raises a bare Exception here
            if self.errored:
                raise
            # After a shape error the id stays usable, half loaded.
            await self.remove_lora(request.lora_int_id)
            shutil.rmtree(request.lora_path, ignore_errors=True)
            reason = str(error).removeprefix(_FAILURE_PREFIX)
            reason = reason.replace(request.lora_path, shown_path)
            text = f"Adapter {request.lora_name} cannot be loaded: {reason}"
            is_full = any(mark in reason for mark in _CAPACITY_MARKS)
            raise (AdapterCapacityError if is_full else AdapterRefusedError)(text) from error

    async def _pin(self, adapter: AdapterRef) -> None:
        try:
            await self.pin_lora(adapter.engine_id)
        except Exception as error:  # vLLM raises a bare Exception here
            await self.unload(adapter)
            raise AdapterCapacityError(
                f"Adapter {adapter.name} cannot be pinned: {error}"
            ) from error
        self._pinned.add(adapter.engine_id)

    async def _load_zero_adapter(self, folder: Path) -> LoRARequest:
        for module, rows, columns in _linear_layers(Path(self.model_config.model)):
            _write_zero_adapter(folder, module, rows, columns)
            request = LoRARequest("lmi-vllm-base", BASE_ADAPTER_ID, str(folder))
            try:
                await self._add(request, shown_path=str(folder))
            except AdapterRefusedError as error:
                logger.debug("no all-zero adapter on %s: %s", module, error)
                continue
            await self.pin_lora(BASE_ADAPTER_ID)
            return request
        raise EngineStartError(
            "enable_lora on CPU: no linear layer was found for the all-zero adapter that keeps "
            "base answers apart from adapters' (a vLLM bug on CPU); start without enable_lora"
        )


def _copy_adapter(source: Path, target: Path) -> None:
    """Copy the files of an adapter folder; its sub-folders are never read by the engine."""
    if not source.is_dir():
        raise NotADirectoryError(str(source))
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, target / file.name)


def _linear_layers(model: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (module name, rows, columns) of one layer per known kind, from safetensors headers."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in sorted(model.glob("*.safetensors"))[:1]:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            shape = tensor.get("shape", ())
            if name.endswith(".weight") and len(shape) == 2:  # noqa: PLR2004 (a matrix)
                shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    for kind in _ZERO_MODULES:
        for module, (rows, columns) in shapes.items():
            if module.endswith("." + kind):
                yield module, rows, columns
                break


def _write_zero_adapter(folder: Path, module: str, rows: int, columns: int) -> None:
    """Write a rank-1 PEFT adapter whose product is zero, in safetensors form."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"lora_A": (1, columns), "lora_B": (rows, 1)}
    header, offset = {}, 0
    for name, (height, width) in tensors.items():
        end = offset + 4 * height * width  # float32
        header[f"base_model.model.{module}.{name}.weight"] = {
            "dtype": "F32",
            "shape": [height, width],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + bytes(offset)
    )
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": "",
                "r": 1,
                "lora_alpha": 1,
                "bias": "none",
                "target_modules": [module.rsplit(".", 1)[-1]],
            }
        )
    )
