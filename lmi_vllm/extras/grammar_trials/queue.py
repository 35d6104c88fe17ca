"""Fair scheduling of grammars between sources: of trials in the server, then in the engine.

A trial may take its whole time limit. So that a client that asks for many does not make others
wait, one source (a key, or a client's address) never has all slots. A free slot goes to the
source that has the fewest. Of these, sources whose trials were slow lately come last. Of the rest,
the one comes first that waited longest since its last trial.

A grammar that passed is compiled once more in the engine's few threads. vLLM's own queue for them
is in order of arrival, so that one client's grammars made all others wait.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.engine.base import GRAMMAR_SOURCE

MAX_TRIALS: Final = 3  # children; more would only slow each other down
MAX_OF_ONE_SOURCE: Final = 2  # of these
MAX_SLOW_SOURCES: Final = 4096  # that are remembered


@dataclass(eq=False, slots=True)
class _Waiting:
    source: str
    turn: "asyncio.Future[None]"


@dataclass(slots=True)
class FairSemaphore:
    """A semaphore of `MAX_TRIALS` slots that is fair between sources."""

    slow_seconds: float = 1.0  # of a trial: it costs its source the place before others
    running: "Counter[str]" = field(default_factory=Counter)
    _waiting: list[_Waiting] = field(default_factory=list)
    # Sources that wait, by when they began to, or a trial of theirs began or ended.
    _since: dict[str, int] = field(default_factory=dict)
    # The seconds of slow trials by source, half as many after each further one.
    _slow: "OrderedDict[str, float]" = field(default_factory=OrderedDict)
    _count: int = 0

    @contextlib.asynccontextmanager
    async def hold(self, source: str) -> AsyncIterator[None]:
        """Wait for a place and have it while the body runs."""
        waiter = _Waiting(source, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        if source not in self._since:
            self._to_the_end(source)
        self._admit()
        began = None
        try:
            await waiter.turn
            began = time.monotonic()
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._forget(source)
            else:
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
                one
                for one in self._waiting
                if self.running[one.source] < MAX_OF_ONE_SOURCE and not one.turn.cancelled()
            ]
            if not able:
                return
            first = min(able, key=self._order)
            self._waiting.remove(first)
            self._to_the_end(first.source)
            self.running[first.source] += 1
            first.turn.set_result(None)

    def _order(self, one: _Waiting) -> tuple[int, bool, int]:
        return self.running[one.source], one.source in self._slow, self._since[one.source]

    def _to_the_end(self, source: str) -> None:
        self._count += 1
        self._since[source] = self._count
        self._forget(source)

    def _forget(self, source: str) -> None:
        if not any(one.source == source for one in self._waiting):
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
