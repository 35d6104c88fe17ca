"""What the workers say of the adapters that they hold: with a slot, evicted, pinned, unloaded.

The shared engine has two slots and keeps no further adapter in main memory. One with more memory is
in integration/adapters_on_demand.py, one with two ranks in integration/parallel_ranks.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmi_vllm.engine.base import ResidentAdapter
from tests.contract.adapter_loader import Loader
from tests.contract.conftest import LoopThread
from tests.support.adapter_files import make_adapter

pytestmark = pytest.mark.vllm


@pytest.fixture
def adapters(run: LoopThread, vllm_engine: Any) -> Iterator[Loader]:
    """Load adapters; they are unloaded afterwards."""
    loader = Loader(run, vllm_engine)
    yield loader
    for ref in loader.loaded:
        loader.unload(ref)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters."""
    root = tmp_path_factory.mktemp("adapters")
    return [make_adapter(root / f"a{seed}", seed) for seed in range(3)]


def resident(adapters: Loader) -> dict[str, ResidentAdapter]:
    """Return what the one rank holds now, by name."""
    adapters.run(adapters.engine.read_adapters())
    (rank,) = adapters.engine.active_adapters.ranks
    return {one.name: one for one in rank}


def test_idle_adapter_is_resident_until_another_takes_its_slot(
    adapters: Loader, folders: list[Path]
) -> None:
    """By loading, and by a step of the engine that needs a slot."""
    refs = [adapters.load(folder, f"r{number}") for number, folder in enumerate(folders[:2])]
    assert resident(adapters) == {name: ResidentAdapter(name, True) for name in ("r0", "r1")}
    adapters.ask(refs[0])
    assert resident(adapters).keys() == {"r0", "r1"}
    refs.append(adapters.load(folders[2], "r2"))
    assert resident(adapters).keys() == {"r0", "r2"}  # r1 was used least recently
    adapters.ask(refs[1])
    assert resident(adapters).keys() == {"r1", "r2"}
    adapters.unload(refs[1])
    assert resident(adapters).keys() == {"r2"}
    assert adapters.engine.active_adapters.running == ()


def test_pinned_adapter_is_named_so(adapters: Loader, folders: list[Path]) -> None:
    """It is not evicted."""
    adapters.load(folders[0], "kept", pinned=True)
    for number, folder in enumerate(folders[1:]):
        adapters.ask(adapters.load(folder, f"r{number}"))
    found = resident(adapters)
    assert found == {"kept": ResidentAdapter("kept", True, True), "r1": ResidentAdapter("r1", True)}


def test_two_loads_of_a_name_are_one_row(adapters: Loader, folders: list[Path]) -> None:
    """While an adapter is replaced, the old load serves its last requests."""
    for folder in folders[:2]:
        adapters.load(folder, "same")
    assert resident(adapters) == {"same": ResidentAdapter("same", True)}


def test_workers_are_asked_only_if_something_may_have_changed(
    adapters: Loader, folders: list[Path]
) -> None:
    """Requests of an adapter that has its slot change nothing, nor do those of the base model."""
    ref = adapters.load(folders[0], "r0")
    resident(adapters)
    calls = adapters.engine.adapters._calls
    asked = 0
    original = calls.resident_adapters

    async def counted() -> Any:
        nonlocal asked
        asked += 1
        return await original()

    calls.resident_adapters = counted
    try:
        adapters.ask(ref)
        adapters.ask()
        assert resident(adapters).keys() == {"r0"}
        assert asked == 0
        adapters.unload(ref)
        assert resident(adapters) == {}
        assert asked == 1
    finally:
        calls.resident_adapters = original
