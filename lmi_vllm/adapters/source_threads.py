"""Threads in which sources of adapters are resolved: each place has its own.

A thread that hangs cannot be ended. 40 adapters of a store that did not answer held up one of a
local folder.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from lmi_vllm.errors import AdapterRefusedError

MAX_RESOLVING: Final = 4  # of one place at a time; the loop's threads have to serve others
MAX_HANGING: Final = 32  # of one place: calls that timed out
MAX_PLACES: Final = 8  # with threads of their own; further ones share some
RESOLVE_SECONDS: Final = 600.0  # for one adapter, including the wait for a thread
_LOCAL: Final = ""
_OTHERS: Final = "others"


def place_of(src: str) -> str:
    """Return what hangs as a whole: a store's bucket, the hub, or the machine's own folders."""
    scheme, is_url, rest = src.partition("://")
    if is_url:
        return _LOCAL if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}"
    is_hub_id = not src.startswith(("/", ".", "~")) and src.count("/") == 1
    return "hub" if is_hub_id else _LOCAL


def _new_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_RESOLVING, "adapter-source")


@dataclass(slots=True, eq=False)
class _Place:
    threads: ThreadPoolExecutor = field(default_factory=_new_threads)
    calls: set[Future[str]] = field(default_factory=set)
    hanging: set[Future[str]] = field(default_factory=set)


class SourceThreads:
    """Calls `resolve` of sources; they end with this object.

    A source that is resolved too late is given to `release`.
    """

    def __init__(
        self, resolve: Callable[[str], str], release: Callable[[str], None] = lambda _: None
    ) -> None:
        self._resolve = resolve
        self._release = release
        self._places: dict[str, _Place] = {}

    async def resolve(self, src: str) -> str:
        """Return what `resolve` returns of a source.

        Raises:
            AdapterRefusedError: many sources of its place do not answer.
            TimeoutError: it does not answer.
        """
        place = self._place(place_of(src))
        if len(place.hanging) >= MAX_HANGING:
            count = len(place.hanging)
            raise AdapterRefusedError(
                f"{count} sources of adapters do not answer; restart the server"
            )
        threads = place.threads
        call = threads.submit(self._resolve, src)
        place.calls.add(call)
        call.add_done_callback(place.calls.discard)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), RESOLVE_SECONDS)
        except (TimeoutError, asyncio.CancelledError):
            call.add_done_callback(partial(self._release_late, src))
            if call.running():  # it keeps its thread: other sources use the remaining ones
                place.hanging.add(call)
                call.add_done_callback(place.hanging.discard)
                if place.threads is threads:
                    place.threads = _new_threads()
            raise

    def _release_late(self, src: str, call: Future[str]) -> None:
        if not call.cancelled() and call.exception() is None:
            self._release(src)

    def _place(self, name: str) -> _Place:
        for known, place in tuple(self._places.items()):
            if not place.calls:
                del self._places[known]
        if name not in (_LOCAL, *self._places) and len(self._places) >= MAX_PLACES:
            name = _OTHERS
        return self._places.setdefault(name, _Place())
