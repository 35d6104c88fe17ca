"""Keeps Python's garbage collector away from what vLLM and torch import: 600,000 objects that stay.

A full collection over them stops the event loop for 0.3 to 0.4 s, and with it every stream and
every refusal; collections while they are imported cost a fifth of the import (DECISIONS.md 42).
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_without_collections() -> Iterator[None]:
    """Import in this block: the collector rests, and ignores for good what was made meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def settle() -> None:
    """Call when a model is ready: what there is now is not looked at again while it serves."""
    gc.collect()
    gc.freeze()


def settle_again() -> None:
    """As `settle`, for another engine; the sockets and threads of the old one are in cycles."""
    gc.unfreeze()
    settle()
