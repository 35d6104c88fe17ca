"""How much a store is asked at once, and for names that clients invent: counted at a real one."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lmi_vllm.errors import NotReadyError, UnknownAdapterError
from lmi_vllm.features.adapter_store import on_demand
from lmi_vllm.features.adapter_store.negative_cache import ABSENT_SECONDS, UNREACHABLE_SECONDS
from lmi_vllm.features.adapter_store.on_demand import MAX_FETCHES, MAX_LOOKUPS
from tests.unit.features.adapter_store.conftest import Bench


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What the store waits for; open at the end, so that no thread is left behind."""
    opened = threading.Event()
    yield opened
    opened.set()


async def use(bench: Bench, name: str) -> bool:
    """Use the adapter as a request does; returns whether the store has it."""
    try:
        async with bench.registry.hold(name):
            return True
    except UnknownAdapterError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    """Return once it holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def fetched(bench: Bench) -> set[str]:
    """Return the adapters of which a file has been asked for."""
    return {key.split("/")[1] for key in bench.s3.objects_sent}


async def test_fetches_at_a_time_are_bounded(bench: Bench, gate: threading.Event) -> None:
    """The others wait for their turn, look-ups do not, and each is fetched once."""
    names = [f"a{number}" for number in range(2 * MAX_FETCHES)]
    bench.put(*names)
    bench.open()
    bench.s3.pause = gate
    clients = [asyncio.create_task(use(bench, name)) for name in names]
    await until(lambda: len(fetched(bench)) >= MAX_FETCHES)
    for number in range(20):  # a look-up each: time enough for a fetch that should wait
        assert not await use(bench, f"invented{number}")
    assert len(fetched(bench)) == MAX_FETCHES
    gate.set()
    assert all(await asyncio.gather(*clients))
    assert fetched(bench) == {*names}
    assert len(bench.s3.objects_sent) == len({*bench.s3.objects_sent})


async def test_lookups_at_a_time_are_bounded(bench: Bench, gate: threading.Event) -> None:
    """A hundred names that a client invents are not a hundred calls at once."""
    bench.open()
    bench.s3.pause_lists = gate
    names = [f"invented{number}" for number in range(100)]
    clients = [asyncio.create_task(use(bench, name)) for name in names]
    await until(lambda: bench.calls >= MAX_LOOKUPS)
    await asyncio.to_thread(gate.wait, 0.5)  # for a call that should wait
    assert bench.calls == MAX_LOOKUPS
    gate.set()
    assert not any(await asyncio.gather(*clients))
    assert sorted(bench.looked_up) == sorted(names)


async def test_store_that_hangs_holds_no_request(
    bench: Bench, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none that waits for its turn behind those that are asked; the store may come back."""
    monkeypatch.setattr(on_demand, "LOOKUP_SECONDS", 0.5)
    bench.put("fr")
    bench.open()
    bench.s3.stall = gate
    names = ["fr", *(f"invented{number}" for number in range(2 * MAX_LOOKUPS))]
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*(use(bench, name) for name in names), return_exceptions=True)
    assert [type(end) for end in ends] == [NotReadyError] * len(names)
    gate.set()
    monkeypatch.setattr(on_demand, "LOOKUP_SECONDS", 60.0)
    bench.time += UNREACHABLE_SECONDS
    assert await use(bench, "fr")


async def test_invented_names_cost_a_call_each_in_a_while(bench: Bench) -> None:
    """However often, and by however many clients, they are repeated."""
    bench.open()
    names = [f"invented{number}" for number in range(30)]
    for _ in range(3):
        assert not any(await asyncio.gather(*(use(bench, name) for name in 4 * names)))
    assert sorted(bench.looked_up) == sorted(names)
    bench.time += ABSENT_SECONDS
    await asyncio.gather(*(use(bench, name) for name in 4 * names))
    assert sorted(bench.looked_up) == sorted(2 * names)


async def test_fetch_that_takes_long_holds_no_request(
    bench: Bench, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503, which a proxy sends to another server; it goes on, and is not begun a second time."""
    monkeypatch.setattr(on_demand, "FIND_SECONDS", 0.2)
    bench.put("fr")
    bench.open()
    bench.s3.pause = gate
    for _ in range(2):
        with pytest.raises(NotReadyError, match="fr is still being fetched"):
            await asyncio.wait_for(use(bench, "fr"), 60)
    await until(lambda: "fr" in fetched(bench))
    gate.set()
    monkeypatch.setattr(on_demand, "FIND_SECONDS", 60.0)
    assert await use(bench, "fr")
    assert len(bench.s3.objects_sent) == len({*bench.s3.objects_sent})
