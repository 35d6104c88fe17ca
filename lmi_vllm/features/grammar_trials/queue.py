"""Fair scheduling of grammars between sources: of trials in the server, then in the engine.

A trial may take its whole time limit. So that a client that asks for many does not make others
wait, one source (a key, or a client's address) never has all slots. A free slot goes to the
source that has the fewest. Of these, sources whose trials were slow lately come last. Of the rest,
the one comes first that waited longest since its last trial. A grammar that several sources ask for
is tried once, in the first turn of any of them.

A grammar that passed is compiled once more in the engine's few threads. vLLM's own queue for them
is in order of arrival, so that one client's grammars made all others wait.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.engine.base import GRAMMAR_SOURCE

MAX_TRIALS: Final = 3  # children; more would only slow each other down
MAX_OF_ONE_SOURCE: Final = 2  # of these
MAX_SLOW_SOURCES: Final = 4096  # that are remembered


@dataclass(eq=False, slots=True)
class Place:
    """One trial's place in the queue of each source that asks for it, by its requests."""

    sources: "Counter[str]" = field(default_factory=Counter)
    turn: "asyncio.Future[str] | None" = None  # the source in whose turn it begins


@dataclass(slots=True)
class FairSemaphore:
    """A semaphore of `MAX_TRIALS` slots that is fair between sources."""

    slow_seconds: float = 1.0  # of a trial: it costs its source the place before others
    running: "Counter[str]" = field(default_factory=Counter)
    _waiting: list[Place] = field(default_factory=list)
    # Sources that wait, by when they began to, or a trial of theirs began or ended.
    _since: dict[str, int] = field(default_factory=dict)
    # The seconds of slow trials by source, half as many after each further one.
    _slow: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    _count: int = 0

    @contextlib.contextmanager
    def asked_by(self, place: Place, source: str) -> Iterator[None]:
        """Let the trial wait in the turn of this source, too, while the body runs."""
        place.sources[source] += 1
        if place in self._waiting:
            self._arrive(source)
            self._admit()
        try:
            yield
        finally:
            place.sources[source] -= 1
            place.sources += Counter()  # without those that no request asks for
            self._forget(source)

    @contextlib.asynccontextmanager
    async def hold(self, place: Place) -> AsyncIterator[None]:
        """Wait until one of the place's sources may have a trial; it has while the body runs."""
        place.turn = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        for source in place.sources:
            self._arrive(source)
        self._admit()
        began = None
        try:
            await place.turn
            began = time.monotonic()
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
                self._forget(*place.sources)
            else:
                source = place.turn.result()
                if began is not None:  # else it was cancelled in its turn
                    self._charge(source, time.monotonic() - began)
                self._release(source)

    def _charge(self, source: str, seconds: float) -> None:
        """Remember a source whose trial was slow until its further ones have been quick."""
        cost = max(self._slow.pop(source, 0.0) / 2, seconds)
        if cost >= self.slow_seconds:
            self._slow[source] = cost
        if len(self._slow) > MAX_SLOW_SOURCES:
            self._slow.popitem(last=False)

    def _release(self, source: str) -> None:
        self.running[source] -= 1
        if not self.running[source]:
            del self.running[source]
        self._to_the_end(source)
        self._admit()

    def _admit(self) -> None:
        while self.running.total() < MAX_TRIALS:
            able = [
                (place, source)
                for place in self._waiting
                if place.turn is not None and not place.turn.cancelled()
                for source in place.sources
                if self.running[source] < MAX_OF_ONE_SOURCE
            ]
            if not able:
                return
            first, own = min(able, key=lambda one: self._order(one[1]))
            self._waiting.remove(first)
            self._to_the_end(own)
            self._forget(*first.sources)
            self.running[own] += 1
            if first.turn is not None:
                first.turn.set_result(own)

    def _order(self, source: str) -> tuple[int, bool, int]:
        return self.running[source], source in self._slow, self._since[source]

    def _arrive(self, source: str) -> None:
        if source not in self._since:
            self._to_the_end(source)

    def _to_the_end(self, source: str) -> None:
        self._count += 1
        self._since[source] = self._count
        self._forget(source)

    def _forget(self, *sources: str) -> None:
        """Forget since when these have waited, unless they do."""
        for source in sources:
            if not any(source in place.sources for place in self._waiting):
                self._since.pop(source, None)


@dataclass(slots=True)
class SharedTask:
    """A task that is cancelled when no caller waits for it any more."""

    coroutine: Coroutine[Any, Any, str]
    _task: "asyncio.Task[str] | None" = None
    _waiters: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or was given up."""
        return self._task is not None and (self._task.done() or bool(self._task.cancelling()))

    async def result(self) -> str:
        """Return the task's result; cancelling the last waiting caller ends it."""
        if self._task is None:
            self._task = asyncio.create_task(self.coroutine)
        self._waiters += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiters -= 1
            if not self._waiters:
                self._task.cancel()


class FairExecutor:
    """An engine's threads for grammars, fair between the clients of requests."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        # The first one has waited longest since a grammar of its own was begun.
        self._waiting: OrderedDict[str, deque[tuple[Any, Callable[[Any], Any], Any]]]
        self._waiting = OrderedDict()

    def submit(self, compile_grammar: Callable[[Any], Any], request: Any) -> "Future[Any]":
        """Return the future grammar of a request of vLLM's."""
        grammar: Future[Any] = Future()
        # A text: without trials (LMI_GRAMMAR_TIMEOUT=0) a client's own value comes here.
        source = str((request.sampling_params.extra_args or {}).get(GRAMMAR_SOURCE, ""))
        with self._lock:
            jobs = self._waiting.setdefault(source, deque())
            jobs.append((grammar, compile_grammar, request))
        self._threads.submit(self._compile_next)
        return grammar

    def _compile_next(self) -> None:
        with self._lock:
            source, jobs = self._waiting.popitem(last=False)
            grammar, compile_grammar, request = jobs.popleft()
            if jobs:
                self._waiting[source] = jobs
        if request.is_finished():
            grammar.cancel()
            return
        try:
            grammar.set_result(compile_grammar(request))
        except Exception as error:  # noqa: BLE001 (the request's end, as in an executor)
            grammar.set_exception(error)

    def shutdown(self, **options: Any) -> None:
        """Stop the threads, as vLLM does at its end."""
        self._threads.shutdown(**options)
