"""The adapters of an engine, guarded so that none can crash it or answer for another.

These are vLLM's defects with adapters (seen with 0.32, DECISIONS.md 9) and the guards:

- An adapter in `generate()` that is not loaded ends the engine. Only ids that `load` has accepted
  are found.
- The scheduler does not count pinned slots, and a step with more adapters than free slots ends the
  engine. Requests wait here for a slot (`workarounds.adapter_slots`).
- The engine's step reads an evicted adapter again, and ends if its folder has changed. The key of
  the prefix cache is name and path. So every load reads a private copy, which stays until its last
  request has ended.
- Two loads of one name in one step count as one, and the engine ends. Names are made unique.
- A failed load stays half usable under its id. It is removed, and ids are never used again.
- With every slot pinned, the next adapter ends the engine. It is refused here.
- Modules without a LoRA layer are ignored. Their adapters are refused
  (`workarounds.ignored_modules`).

Each guard has a test in tests/contract/test_adapter_isolation.py that fails without it and says
when it may go. This module imports no vLLM.
"""

import asyncio
import contextlib
import errno
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

from lmi_vllm.checks.base_model import BaseModel
from lmi_vllm.checks.safetensors_header import DamagedFileError
from lmi_vllm.engine.base import ActiveAdapters
from lmi_vllm.engine.vllm.adapter_files import NO_NAMES, copy_adapter, renamed_weights
from lmi_vllm.engine.vllm.adapter_pins import AdapterPins
from lmi_vllm.engine.vllm.engine_calls import (
    EngineCalls,
    LoadedAdapter,
    WorkerRefusalError,
    engine_name,
)
from lmi_vllm.engine.vllm.forks import in_own_thread
from lmi_vllm.engine.vllm.parts import ConvertPickle
from lmi_vllm.engine.vllm.residency import Residency
from lmi_vllm.engine.vllm.workarounds.adapter_slots import AdapterSlots, NoSlotError
from lmi_vllm.engine.vllm.workarounds.ignored_modules import (
    NO_REASON,
    Refusal,
    refuse_ignored,
)
from lmi_vllm.errors import AdapterCapacityError, AdapterMissingError, AdapterRefusedError
from lmi_vllm.messages import AdapterRef
from lmi_vllm.private_folders import PrivateFolder

logger = logging.getLogger(__name__)

BASE_ADAPTER_NAME: Final = "lmi-vllm-base"
BASE_ADAPTER_ID: Final = 1  # the all-zero adapter; ids of users' adapters are above
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
COPY_SECONDS: Final = 600.0  # to copy an adapter's files; no other adapter is loaded meanwhile
UNKNOWN_BASE: Final = BaseModel()


class UsableAdapters(Protocol):
    """The adapter calls that request handling needs."""

    @property
    def base(self) -> LoadedAdapter | None:
        """The adapter of requests without an adapter; None if they need none."""
        ...

    def find(self, engine_id: int, shown: str) -> LoadedAdapter:
        """Return a loaded adapter.

        Raises:
            LmiError: it is not loaded, or can have no slot.
        """
        ...

    def hold(self, adapter: LoadedAdapter, shown: str) -> AbstractAsyncContextManager[None]:
        """Wait for a slot, and keep it while the body runs.

        Raises:
            LmiError: it can have none.
        """
        ...

    async def release(self, adapter: LoadedAdapter) -> None:
        """Clean up after a request whose adapter may have been removed."""
        ...


class EngineAdapters:
    """The adapters of an engine that this process started; `folder` has the private copies.

    Adapters are for `served`, `most_bytes` is the size of an adapter's files.
    Files of adapters below one of `roots` lie below them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one name for each bound
        self,
        calls: EngineCalls,
        convert_pickle: ConvertPickle,
        slots: int = 0,
        folder: PrivateFolder | None = None,
        served: BaseModel = UNKNOWN_BASE,
        most_bytes: int = 0,
        roots: Sequence[Path] = (),
    ) -> None:
        self.base: LoadedAdapter | None = None
        self.folder = folder
        self._served = served
        self._most_bytes = most_bytes
        self._roots = roots
        self._calls = calls
        self._convert_pickle = convert_pickle
        self._slots = AdapterSlots(slots)
        self._residency = Residency(calls)
        self._loaded: dict[int, LoadedAdapter] = {}
        self._pins = AdapterPins(calls, self._slots, self._loaded.get)

    @property
    def active(self) -> ActiveAdapters:
        """The adapters that requests run on or wait for, by the names in the requests."""
        names = {one.engine_id: one.shown for one in self._loaded.values()}
        taken, awaited = (
            tuple(sorted({names[one] for one in found if one in names}))
            for found in (self._slots.taken, self._slots.awaited)
        )
        ranks = self._residency.named(names)
        return ActiveAdapters(self._slots.count, taken, awaited, ranks, queued=self._slots.queued)

    async def read_resident(self) -> None:
        """Ask the workers which adapters they hold, if that may have changed."""
        if self._slots.count:
            await self._residency.update(self._slots.taken)

    def find(self, engine_id: int, shown: str) -> LoadedAdapter:
        """Return a loaded adapter; see `UsableAdapters.find`."""
        known = self._loaded.get(engine_id)
        if known is None:
            raise AdapterRefusedError(f"The adapter {shown} is not loaded")
        if not self._slots.may_have_slot(engine_id):
            raise _no_slot(shown, self._slots.count)
        return known

    @contextlib.asynccontextmanager
    async def hold(self, adapter: LoadedAdapter, shown: str) -> AsyncIterator[None]:
        """Keep a slot while the body runs; see `UsableAdapters.hold`."""
        was_everywhere = self._residency.is_everywhere(adapter.engine_id)
        try:
            async with self._slots.hold(adapter.engine_id):
                await self._pins.complete(adapter.engine_id)
                yield
        except NoSlotError:
            raise _no_slot(shown, self._slots.count) from None
        finally:
            if not (was_everywhere and self._residency.is_everywhere(adapter.engine_id)):
                self._residency.note_steps()  # they may have evicted others

    async def release(self, adapter: LoadedAdapter) -> None:
        """Forget an adapter that was removed while its last request ran."""
        is_loaded = adapter.engine_id in self._loaded
        if not is_loaded and not self._slots.running(adapter.engine_id):
            await self._forget(adapter)

    @contextlib.asynccontextmanager
    async def hold_for_another(self, engine_id: int) -> AsyncIterator[None]:
        """Keep an adapter usable for a request of another client of this engine.

        Raises:
            AdapterRefusedError: it is not loaded.
            AdapterCapacityError: no slot is left for it.
        """
        adapter = self._loaded.get(engine_id)
        if adapter is None:
            raise AdapterRefusedError("The adapter is not loaded")
        try:
            async with self.hold(adapter, adapter.shown):
                if engine_id not in self._loaded:  # removed while this request waited
                    raise AdapterRefusedError("The adapter is not loaded")
                yield
        finally:
            await self.release(adapter)

    @property
    def shared(self) -> tuple[LoadedAdapter, ...]:
        """The loaded adapters, with the names and paths that other clients need."""
        return tuple(self._loaded.values())

    async def load(self, adapter: AdapterRef) -> None:
        """Load a private copy of `adapter`, once, and make it findable; pin it as asked.

        Raises:
            AdapterRefusedError: in the engine's words; nothing of the adapter stays.
            AdapterCapacityError: no slot is left for it.
        """
        if self.folder is None:
            raise AdapterRefusedError("LoRA is not enabled.")
        known = self._loaded.get(adapter.engine_id)
        if known is not None and known.shown != adapter.name:
            raise AdapterRefusedError(f"engine id {adapter.engine_id} belongs to another adapter")
        if known is not None:
            await (self._pins.pin(known) if adapter.pinned else self._pins.unpin(known.engine_id))
            return
        # A new path each time: it is half of the prefix cache's key.
        if self._slots.is_pinned(adapter.replaces):
            async with self._pins.replacing(adapter):
                await self._load_copy(adapter, Path(tempfile.mkdtemp(dir=self.folder.path)))
            return
        if self._slots.is_all_pinned:
            raise _no_slot(adapter.name, self._slots.count)
        loaded = await self._load_copy(adapter, Path(tempfile.mkdtemp(dir=self.folder.path)))
        if not adapter.pinned:
            return
        try:
            await self._pins.pin(loaded)
        except BaseException:
            await self.unload(adapter)
            raise

    async def unload(self, adapter: AdapterRef) -> None:
        """Remove the adapter and its private copy after its last request; ignores unknown ids."""
        loaded = self._loaded.pop(adapter.engine_id, None)
        if loaded is None:
            return
        await self._pins.unpin(adapter.engine_id)
        if not self._slots.running(adapter.engine_id):
            await self._forget(loaded)

    async def add(self, adapter: LoadedAdapter, shown_path: str) -> None:
        """Let the engine read an adapter; a failure leaves nothing behind.

        Raises:
            AdapterRefusedError: in the engine's words, with the user's names.
            AdapterCapacityError: there is no room for it.
        """
        try:
            await self._calls.add_adapter(adapter)
            refuse_ignored(await self._calls.ignored_modules(adapter))
        except Exception as error:  # vLLM raises a bare Exception here
            if self._calls.is_dead:
                raise
            # After a shape error the id stays usable, half loaded.
            await self._forget(adapter)
            reason = str(error) or NO_REASON
            reason = reason.replace(adapter.path, shown_path).replace(adapter.name, adapter.shown)
            text = f"Adapter {adapter.shown} cannot be loaded: {reason}"
            is_full = isinstance(error, WorkerRefusalError) and error.kind is Refusal.FULL
            raise (AdapterCapacityError if is_full else AdapterRefusedError)(text) from error

    async def add_base(self, adapter: LoadedAdapter, shown_path: str) -> None:
        """Put the adapter into the engine for good that requests without one carry; see `add`."""
        await self.add(adapter, shown_path)
        await self._calls.pin_adapter(adapter.engine_id)
        self.base = adapter

    async def _forget(self, adapter: LoadedAdapter) -> None:
        """Drop the weights and the private copy; a request may have loaded the weights again."""
        if not self._calls.is_dead:
            await self._calls.remove_adapter(adapter.engine_id)
        await asyncio.to_thread(shutil.rmtree, adapter.path, ignore_errors=True)

    async def _load_copy(self, adapter: AdapterRef, private: Path) -> LoadedAdapter:
        name = engine_name(adapter.name, adapter.engine_id)
        loaded = LoadedAdapter(adapter.engine_id, name, str(private), adapter.name)
        names = await self._copied(adapter, private, NO_NAMES)
        try:
            await self.add(loaded, adapter.path)
        except AdapterRefusedError as refusal:
            if not names or isinstance(refusal, AdapterCapacityError):
                raise
            # VLLM does not know these names, and others fit.
            await self._copied(adapter, private, names)
            await self.add(loaded, adapter.path)
            some = next(iter(names.items()))
            logger.info("adapter %s: %d names changed: %s", adapter.name, len(names), some)
        self._loaded[adapter.engine_id] = loaded
        return loaded

    async def _copied(
        self, adapter: AdapterRef, private: Path, names: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Make the private copy, with other names; return the names that fit the served model."""
        source, most, served = Path(adapter.path), self._most_bytes, self._served
        convert, roots = self._convert_pickle, self._roots
        copying = in_own_thread(copy_adapter, source, private, served, most, convert, roots, names)
        try:
            await asyncio.wait_for(copying, COPY_SECONDS)
            return {} if names else await in_own_thread(renamed_weights, private, served)
        except (AdapterRefusedError, DamagedFileError):
            shutil.rmtree(private, ignore_errors=True)
            raise
        except OSError as error:
            shutil.rmtree(private, ignore_errors=True)
            if error.errno in _FULL:
                raise AdapterCapacityError(
                    f"Adapter {adapter.name}: the server's disk has no room for a copy of it at "
                    f"{private.parent} (TMPDIR)"
                ) from error
            raise _unreadable(adapter, error) from error


def _no_slot(name: str, slots: int) -> AdapterCapacityError:
    return AdapterCapacityError(f"No free lora slots for adapter {name}: all {slots} are pinned")


def _unreadable(adapter: AdapterRef, error: OSError) -> AdapterRefusedError:
    if isinstance(error, NotADirectoryError):
        return AdapterMissingError(
            f"Only local LoRA models are supported. {adapter.path} is not a valid path"
        )
    reason = str(error) or f"its files did not answer within {COPY_SECONDS:g} s"
    return AdapterRefusedError(f"Adapter {adapter.name} cannot be read: {reason}")
