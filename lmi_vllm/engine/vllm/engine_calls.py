"""Calls to the running engine about adapters and its sleep.

The calls are counted: an engine that answers neither requests nor calls for a while hangs. This
module imports no vLLM.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from lmi_vllm.engine.vllm.workarounds.ignored_modules import (
    ADD_METHOD,
    METHOD,
    PIN_METHOD,
    RESIDENT_METHOD,
    Refusal,
    ignored_by_all,
)
from lmi_vllm.errors import AdapterRefusedError

RELOAD_METHOD: Final = "reload_weights"  # of vLLM's workers
INSPECTIONS: Final = 3  # of an adapter, each after it was read again


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in the engine: `name` and `path` are the engine's, `shown` is the user's name."""

    engine_id: int
    name: str
    path: str
    shown: str


def engine_name(requested: str, engine_id: int) -> str:
    """Return the name of a load inside vLLM (DECISIONS.md 116).

    It compares adapters by name alone: of two loads of one name in one step it would activate one,
    and end at the rows of the other.
    """
    return f"{requested}@{engine_id}"


def requested_name(name: str) -> str:
    """Return the name in requests for a load's name inside vLLM."""
    return name.rpartition("@")[0] or name


class WorkerRefusalError(Exception):
    """A worker refused a call; the text is its reason."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = Refusal(kind)


class EngineCalls:
    """Calls of an `AsyncLLM`; their failures are plain exceptions."""

    def __init__(self, llm: Any) -> None:
        self.running = 0
        self.answered = 0
        self._llm = llm

    @property
    def is_dead(self) -> bool:
        """Whether the engine is."""
        return bool(self._llm.errored)

    async def add_adapter(self, adapter: LoadedAdapter) -> None:
        """Read the adapter, unless it is loaded."""
        await self._each(ADD_METHOD, adapter.name, adapter.engine_id, adapter.path)

    async def ignored_modules(self, adapter: LoadedAdapter) -> Sequence[str]:
        """Return the modules of a loaded adapter that have no effect in the engine.

        Raises:
            AdapterRefusedError: requests of other adapters evict it each time.
        """
        for _ in range(INSPECTIONS):
            # The engine reads both calls between two steps, so no other request's adapter evicts
            # this one before the second call.
            question = self._counted(self._each_rank(METHOD, adapter.engine_id))
            _, ranks = await asyncio.gather(self.add_adapter(adapter), question)
            if (ignored := ignored_by_all([*chain.from_iterable(ranks)])) is not None:
                return ignored
        raise AdapterRefusedError("it was evicted again and again while it was checked")

    async def sleep(self, level: int) -> None:
        """Give memory of the devices back; the caches are emptied."""
        await self._counted(self._llm.sleep(level))

    async def wake_up(self, level: int) -> None:
        """Take the memory back; after level 2 with the weights as their files have them.

        vLLM schedules again once both kinds of memory are back, and drops every adapter as it reads
        weights. Before, an adapter would be written into memory that is gone.
        """
        if level == 1:
            await self._counted(self._llm.wake_up())
            return
        await self._counted(self._llm.wake_up(["weights"]))
        await self._counted(self._each_rank(RELOAD_METHOD))
        await self._counted(self._llm.wake_up(["kv_cache"]))

    async def remove_adapter(self, engine_id: int) -> None:
        """Drop the adapter's weights."""
        await self._counted(self._llm.remove_lora(engine_id))

    async def pin_adapter(self, engine_id: int) -> None:
        """Keep the adapter in its slot."""
        await self._each(PIN_METHOD, engine_id)

    async def resident_adapters(self) -> list[list[list[tuple[int, bool, bool]]]]:
        """Return what each worker of each data-parallel rank holds: see `AdapterInspection`."""
        answers: list[list[list[tuple[int, bool, bool]]]] = await self._each_rank(RESIDENT_METHOD)
        return answers

    async def _each(self, method: str, *args: object) -> None:
        """Call every worker of every rank; raises the first reason for a failure."""
        ranks = await self._counted(self._each_rank(method, *args))
        for kind, reason in chain.from_iterable(ranks):
            if kind:
                raise WorkerRefusalError(kind, reason)

    async def _each_rank(self, method: str, *args: object) -> Any:
        """Call every worker; returns a list of the workers' answers for each data-parallel rank.

        `AsyncLLM.collective_rpc` calls all ranks, and returns the answers of the first alone.
        """
        core, call = self._llm.engine_core, ("collective_rpc", method, None, args, None)
        if (call_all := getattr(core, "call_utility_all_async", None)) is not None:
            return await call_all(*call)
        # vLLM 0.31 has no such method
        calls = (core._call_utility_async(*call, engine=rank) for rank in core.core_engines)
        return await asyncio.gather(*calls)

    async def _counted(self, call: Awaitable[Any]) -> Any:
        """Make a call and count it; a failure is an answer, a cancellation is not."""
        self.running += 1
        try:
            answer = await call
        except Exception:
            self.answered += 1
            raise
        else:
            self.answered += 1
            return answer
        finally:
            self.running -= 1
