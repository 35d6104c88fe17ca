"""The queue of requests: its limit on those in flight, their end at shutdown, their resources."""

import asyncio
import contextlib
from collections.abc import Callable, Container
from functools import partial
from typing import Any, Final

from lmi_vllm.clock import Clock
from lmi_vllm.errors import NotReadyError, OverloadError
from lmi_vllm.inference.lifecycle import DRAIN_RETRY_SECONDS, Lifecycle, State
from lmi_vllm.telemetry.records import RequestRecord

DEFAULT_LIMIT: Final = 1000
IDLE_POLL_SECONDS: Final = 0.02  # seconds between checks whether other front-end processes are idle


class QueueSlots:
    """The number of taken slots in the queue; this base class has those of one process."""

    _taken = 0
    _admitted = 0

    @property
    def admitted(self) -> int:
        """A number that grows with every request of any of these processes."""
        return self._admitted

    @property
    def total(self) -> int:
        """Slots taken by all processes that share the queue."""
        return self._taken

    def add(self, count: int) -> int:
        """Take slots, or give them back with a number below 0; return the new total."""
        self._taken += count
        if count > 0:
            self._admitted += count
        return self._taken


class RequestQueue:
    """Counts the requests in flight, running and waiting, and refuses those beyond its limit.

    Requests that the lifecycle refuses are not counted.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        limit: int = DEFAULT_LIMIT,
        slots: QueueSlots | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.lifecycle = lifecycle
        self.limit = limit
        self._slots = slots or QueueSlots()
        self.clock = clock or Clock()
        self.on_end: list[Callable[[], None]] = []  # called by `cancel_all`
        self._in_flight = 0  # of this process
        self._tasks: dict[asyncio.Task[Any], int] = {}  # a connection's may hold several
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Admitted requests of all processes that have not ended, running and waiting."""
        return self._slots.total

    @property
    def admitted(self) -> int:
        """A number that grows with every request of any process; those that ended stay in it."""
        return self._slots.admitted

    def resize(self, limit: int) -> None:
        """Admit up to `limit` requests from now on; requests in flight stay."""
        self.limit = limit

    def share(self, slots: QueueSlots) -> None:
        """Use the slots that all front-end processes share from now on; call it while idle."""
        self._slots = slots

    def check_room(self, count: int = 1, also: Container[State] = ()) -> None:
        """Check that `count` requests may be admitted now, and in the states `also`.

        Raises:
            NotReadyError: see `Lifecycle.check_ready`.
            OverloadError: they would pass the limit.
        """
        if self.lifecycle.state is not State.HEALTHY:
            self.lifecycle.check_ready(also)
        if self._slots.total + count > self.limit:
            raise OverloadError(self.lifecycle.model_name)

    def take(self, count: int = 1, also: Container[State] = ()) -> Callable[[], None]:
        """Take `count` slots in the queue; return what gives them back, to be called once.

        `also` are states in which the request is admitted, too.

        Raises:
            NotReadyError: see `Lifecycle.check_ready`.
            OverloadError: the slots would pass the limit; requests in flight are not touched.
        """
        if self.lifecycle.state is not State.HEALTHY:
            self.lifecycle.check_ready(also)
        # Add first: of processes that add at once, none exceeds the limit.
        if self._slots.add(count) > self.limit:
            self._slots.add(-count)
            raise OverloadError(self.lifecycle.model_name)
        self._in_flight += count
        self._idle.clear()
        task = asyncio.current_task()
        if task is not None:
            self._tasks[task] = self._tasks.get(task, 0) + 1
        return partial(self._give_back, count, task)

    def _give_back(self, count: int, task: asyncio.Task[Any] | None) -> None:
        if task is not None:
            self._forget(task)
        self._in_flight -= count
        self._slots.add(-count)
        if not self._in_flight:
            self._idle.set()

    def follow(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task`, which goes on after its request was answered, with the others."""
        self._tasks[task] = self._tasks.get(task, 0) + 1
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks[task] -= 1
        if not self._tasks[task]:
            del self._tasks[task]

    def cancel_all(self) -> None:
        """Cancel every request in flight; each is answered with `shutdown_error`."""
        self._is_ending = True
        for task in tuple(self._tasks):
            task.cancel()
        for on_end in self.on_end:
            on_end()

    def shutdown_error(self) -> NotReadyError | None:
        """Take back a cancellation by `cancel_all` and return the error to answer with.

        None if the cancellation has another cause: the client has disconnected and gets no answer.
        """
        task = asyncio.current_task()
        if not self._is_ending or task is None or not task.cancelling():
            return None
        task.uncancel()
        return NotReadyError(
            f"Model {self.lifecycle.model_name}: the server shut down before the answer was "
            "complete",
            DRAIN_RETRY_SECONDS,
        )

    async def wait_own(self, timeout_seconds: float) -> None:
        """Wait until the requests of this process have ended, or for the given time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Return whether all requests in flight ended within the time."""
        with contextlib.suppress(TimeoutError):
            await self.clock.limit(timeout_seconds, self._wait_all())
        return not self.in_flight

    async def _wait_all(self) -> None:
        await self._idle.wait()
        while self.in_flight:  # noqa: ASYNC110 (of other processes, whose events are not ours)
            await asyncio.sleep(IDLE_POLL_SECONDS)


class Holdings:
    """Resources of one request (slots, adapters, streams, timers), released once, last one first.

    A response in the background continues after the answer. All resources are then kept until it
    ends, and it has its own line in the log.
    """

    def __init__(self, queue: RequestQueue, record: RequestRecord | None) -> None:
        self._queue = queue
        self._record = record
        # Called last: most requests hold nothing else, and an exit stack costs more than all they
        # do.
        self._on_release: list[Callable[[], None]] = []
        self._stack: contextlib.AsyncExitStack | None = None
        self._task: asyncio.Task[Any] | None = None  # continues after the answer
        self._later: RequestRecord | None = None  # record of the continued task
        self._closing: asyncio.Task[None] | None = None
        if record is not None:
            record.keep = self.keep

    def add(self, release: Callable[[], None]) -> None:
        """Call `release` at the end."""
        self._on_release.append(release)

    @property
    def stack(self) -> contextlib.AsyncExitStack:
        """An exit stack for resources with an asynchronous release."""
        if self._stack is None:
            self._stack = contextlib.AsyncExitStack()
        return self._stack

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep everything until `task` ends, which continues after the answer."""
        self._task = task
        self._queue.follow(task)

    async def release(self) -> None:
        """Release everything, after a task that continues; may be called twice."""
        if self._task is not None and not self._task.done():
            if self._later is None and self._record is not None:
                self._later = self._record.background()
            self._task.add_done_callback(self._release_later)
            return
        try:
            if self._stack is not None:
                await self._stack.aclose()
        finally:
            while self._on_release:
                self._on_release.pop()()

    def _release_later(self, task: asyncio.Task[Any]) -> None:
        self._closing = asyncio.ensure_future(self.release())
        later, self._later = self._later, None
        if later is not None and self._record is not None:
            later.sequences += self._record.sequences
            later.end_with(task)
