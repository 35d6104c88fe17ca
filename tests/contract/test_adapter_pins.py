"""A pinned adapter is replaced and removed while its requests run (engine/vllm/adapter_pins.py).

The registry is the server's; the engine is vLLM's with two slots (max_loras=2).
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.adapters.adapter import Adapter
from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import AdapterCapacityError, Dialect, LmiError
from lmi_vllm.messages import GenerationChunk
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.adapter_loader import Loader, job
from tests.contract.conftest import LoopThread, collect
from tests.support.adapter_files import copy_adapter, make_adapter

pytestmark = pytest.mark.vllm

LONG = 300  # tokens of a request that is running while others come


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four adapters with weights of their own."""
    root = tmp_path_factory.mktemp("pinned")
    return [make_adapter(root / f"p{seed}", seed + 20) for seed in range(4)]


@pytest.fixture(scope="module")
def texts(run: LoopThread, vllm_engine: Any, folders: Sequence[Path]) -> list[str]:
    """The answer of each adapter, alone in the engine."""
    loader = Loader(run, vllm_engine)
    found = []
    for folder in folders:
        ref = loader.load(folder)
        found.append(loader.ask(ref))
        loader.unload(ref)
    assert len(set(found)) == len(found)
    return found


@pytest.fixture
def registry(run: LoopThread, vllm_engine: Any) -> Iterator[AdapterRegistry]:
    """An empty registry over the session's engine, which is alive and empty afterwards."""
    one = run(_registry(vllm_engine))
    yield one
    for adapter in one:
        run(one.unregister(adapter.name, 10))
    assert not vllm_engine.active_adapters.running
    run(vllm_engine.check_health())


async def _registry(engine: Any) -> AdapterRegistry:
    return AdapterRegistry(engine, lambda src: src, is_enabled=True)


async def _ask(registry: AdapterRegistry, engine: Any, name: str, tokens: int = 24) -> str:
    async with registry.hold(name) as adapter:
        chunks: list[GenerationChunk] = await collect(
            engine, job(adapter.ref, tokens, ignore_eos=tokens == LONG)
        )
    return chunks[-1].text


@asynccontextmanager
async def _running(registry: AdapterRegistry, engine: Any, name: str) -> AsyncIterator[Any]:
    """Yield the task of a long request once it is in the engine."""
    task = asyncio.create_task(_ask(registry, engine, name, LONG))
    while not engine.running_requests:  # noqa: ASYNC110 (vLLM has no event)
        await asyncio.sleep(0.01)
    yield task
    await task


@pytest.mark.parametrize("pinned", [1, 2])
def test_pinned_adapter_is_replaced_under_a_running_request(
    run: LoopThread,
    vllm_engine: Any,
    registry: AdapterRegistry,
    folders: Sequence[Path],
    texts: Sequence[str],
    pinned: int,
) -> None:
    """Each request is answered by the weights that it began with, and others wait, none refused.

    With every slot pinned, requests of the new weights wait for the last one of the old.
    """

    async def scenario() -> None:
        await registry.register(Adapter("a", str(folders[0]), pin=True))
        await registry.register(Adapter("other", str(folders[1]), pin=pinned == 2))
        alone = await _ask(registry, vllm_engine, "a", LONG)
        async with _running(registry, vllm_engine, "a") as old:
            new = Adapter("a", str(folders[2]))
            replacing = asyncio.create_task(registry.replace(new, 60, is_in_place=True))
            while registry.describe("a").src == str(folders[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not old.done()
            answers = await asyncio.gather(
                *(_ask(registry, vllm_engine, name) for name in ("other", "a", "other", "a"))
            )
            assert answers == [texts[1], texts[2]] * 2
            assert await old == alone
        await replacing
        assert registry.describe("a").pin
        assert await _ask(registry, vllm_engine, "a") == texts[2]

    run(scenario())


def test_request_that_waits_for_a_slot_is_told_when_to_try_again(
    run: LoopThread, vllm_engine: Any, registry: AdapterRegistry, folders: Sequence[Path]
) -> None:
    """The last slot is pinned while it waits: on each lane the answer has `Retry-After` then."""
    records: list[RequestRecord] = []

    async def recorded() -> None:
        records.append(RequestRecord("waits", "POST", "/", "/", "-", Dialect.LMI))
        enter_record(records[-1])
        await _ask(registry, vllm_engine, "other")

    async def scenario() -> None:
        for number, name in enumerate(("other", "b")):
            await registry.register(Adapter(name, str(folders[number])))
        await registry.register(Adapter("a", str(folders[2]), pin=True))
        async with _running(registry, vllm_engine, "b"):
            waiting = asyncio.create_task(recorded())
            await asyncio.sleep(0.2)
            await registry.update("b", lambda one: replace(one, pin=True), 60)
            with pytest.raises(LmiError, match="all 2 are pinned"):
                await waiting
        assert records[0].retry_after_seconds == 5

    run(scenario())


def test_replacement_that_is_refused_leaves_the_old_one_pinned(
    run: LoopThread,
    vllm_engine: Any,
    registry: AdapterRegistry,
    folders: Sequence[Path],
    texts: Sequence[str],
    tmp_path: Path,
) -> None:
    """With every slot pinned the new weights are tried in the slot of the old ones."""
    broken = copy_adapter(tmp_path / "broken", folders[3], use_dora=True)

    async def scenario() -> None:
        for number, name in enumerate(("a", "b")):
            await registry.register(Adapter(name, str(folders[number]), pin=True))
        async with _running(registry, vllm_engine, "a"):
            with pytest.raises(LmiError, match=r"DoRA|dora"):
                await registry.replace(Adapter("a", str(broken)), 60, is_in_place=True)
            with pytest.raises(AdapterCapacityError):
                await registry.register(Adapter("c", str(folders[2])))
        asked = ("a", "b", "a", "b")
        answers = await asyncio.gather(*(_ask(registry, vllm_engine, name) for name in asked))
        assert answers == [*texts[:2], *texts[:2]]

    run(scenario())


def test_replaced_twice_under_a_running_request(
    run: LoopThread,
    vllm_engine: Any,
    registry: AdapterRegistry,
    folders: Sequence[Path],
    texts: Sequence[str],
) -> None:
    """Three versions share one slot in turn; the pin is the last one's."""

    async def scenario() -> None:
        await registry.register(Adapter("a", str(folders[0]), pin=True))
        await registry.register(Adapter("b", str(folders[1]), pin=True))
        calls, asked = [], []
        async with _running(registry, vllm_engine, "a"):
            for folder in folders[2:4]:
                new = Adapter("a", str(folder))
                calls.append(asyncio.create_task(registry.replace(new, 60, is_in_place=True)))
                while registry.describe("a").src != str(folder):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                asked.append(asyncio.create_task(_ask(registry, vllm_engine, "a")))
                await asyncio.sleep(0)
            assert await _ask(registry, vllm_engine, "b") == texts[1]
        assert await asyncio.gather(*asked) == texts[2:4]
        await asyncio.gather(*calls)
        await registry.unregister("a", 60)
        await registry.register(Adapter("c", str(folders[0])))
        assert await _ask(registry, vllm_engine, "c") == texts[0]

    run(scenario())


def test_pinned_adapter_that_is_removed_leaves_its_slot_to_others(
    run: LoopThread,
    vllm_engine: Any,
    registry: AdapterRegistry,
    folders: Sequence[Path],
    texts: Sequence[str],
) -> None:
    """While its last request runs, those of other adapters wait instead of being refused."""

    async def scenario() -> None:
        await registry.register(Adapter("other", str(folders[2])))
        for number, name in enumerate(("a", "b")):
            await registry.register(Adapter(name, str(folders[number]), pin=True))
        alone = await _ask(registry, vllm_engine, "a", LONG)
        async with _running(registry, vllm_engine, "a") as old:
            removing = asyncio.create_task(registry.unregister("a", 60))
            while "a" in registry:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert not old.done()
            assert await _ask(registry, vllm_engine, "other") == texts[2]
            assert await old == alone
        await removing

    run(scenario())
