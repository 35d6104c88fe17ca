"""The collector: off while importing, blind to what was imported, not to an old engine's cycles."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from lmi_vllm.engine.factory import imports_without_collections, settle, settle_again


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Leave the collector as it was."""
    yield
    gc.unfreeze()


def test_imports_are_not_interrupted_and_not_looked_at_again() -> None:
    """No collection runs inside; afterwards the collector is on and has less to look through."""
    before = gc.get_freeze_count()
    with imports_without_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert len(gc.get_objects()) < gc.get_freeze_count()


def test_failed_import_leaves_the_collector_on() -> None:
    """An import that raises ends the start, or is tried again: with a collector."""
    with pytest.raises(ImportError), imports_without_collections():
        raise ImportError
    assert gc.isenabled()


def test_cycles_of_the_engine_before_are_freed() -> None:
    """What was frozen with the first engine is collected when the second one is there."""
    old = Cycle()
    gone = weakref.ref(old)
    settle()
    del old
    gc.collect()
    assert gone() is not None  # frozen
    settle_again()
    assert gone() is None
    assert gc.get_freeze_count() > len(gc.get_objects())
