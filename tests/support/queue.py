"""Slots of the queue that a test holds."""

import contextlib
from collections.abc import Iterator

from lmi_vllm.inference.queue import RequestQueue


@contextlib.contextmanager
def admitted(queue: RequestQueue, count: int = 1) -> Iterator[None]:
    """Hold slots while the body runs, as requests do."""
    give_back = queue.take(count)
    try:
        yield
    finally:
        give_back()
