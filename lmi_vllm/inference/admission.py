"""Who may come in: start-up phase, in-flight limit, draining, and what `/ping` says."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import NotReadyError, OverloadError
from lmi_vllm.inference.error_rates import ErrorRates
from lmi_vllm.inference.places import Places, Row


class Phase(StrEnum):
    """Where a start is; the names `/ping` shows."""

    SETTINGS = "settings"
    DOWNLOAD = "download"
    ENGINE = "engine"
    ADAPTERS = "adapters"
    WARM_UP = "warm-up"


class State(StrEnum):
    """The status text of `/ping` (http-api.md 2)."""

    PENDING = "PENDING"
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"  # alive, and stalled
    FAILED = "FAILED"
    DRAINING = "DRAINING"


DRAIN_RETRY_SECONDS: Final = 30
IDLE_POLL_SECONDS: Final = 0.02  # how often other front-end processes are asked whether they are


class Admission:
    """Counts the requests in flight and knows whether new ones may start.

    Made before anything else of the server, so that `/ping` can answer from the first second.
    """

    def __init__(self) -> None:
        self.model_name = "model"
        self.limit = 1000
        self.state = State.PENDING
        self.phase = Phase.SETTINGS
        self.has_model = True
        self.error_rates = ErrorRates()
        # SERVING_HEALTH_CHECK_OVERRIDE: `/ping` is 200 also when the engine has failed for good.
        self.hides_failure = False
        # The model came by POST /models: the server is healthy also while it loads.
        self.is_registered = False
        self.places: Places | Row = Places()
        # Told of each change of the state, and when all that is in flight is to end.
        self.on_state: list[Callable[[State], None]] = []
        self.on_end: list[Callable[[], None]] = []
        self._in_flight = 0  # of this process
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_ending = False
        self._began = time.monotonic()
        self._engine_began: float | None = None
        self._phase_began = self._began
        self._phase_times: dict[Phase, float] = {}
        self._progress: Mapping[str, object] = MappingProxyType({})
        self.download: Mapping[str, object] = MappingProxyType({})  # the last numbers of one
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Admitted requests that have not ended, running and waiting, of all processes."""
        return self.places.total

    @property
    def is_serving(self) -> bool:
        """Whether there is a model and it answers."""
        return self.has_model and self.state is State.HEALTHY

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the server began to start, or to restart its engine."""
        return time.monotonic() - self._began

    @property
    def engine_seconds(self) -> float:
        """Seconds since the engine began to start; 0 before."""
        return 0.0 if self._engine_began is None else time.monotonic() - self._engine_began

    @property
    def phase_seconds(self) -> Mapping[Phase, float]:
        """Seconds of each phase of the last start, the running one included."""
        if self.state is not State.PENDING:
            return dict(self._phase_times)
        running = time.monotonic() - self._phase_began
        return {**self._phase_times, self.phase: self._phase_times.get(self.phase, 0.0) + running}

    def enter_phase(self, phase: Phase) -> None:
        """Say that the start has come to `phase`, unless it is there already."""
        if phase is self.phase:
            return
        now = time.monotonic()
        if phase is Phase.ENGINE:
            self._engine_began = now
        self._end_phase(now)
        self.phase, self._phase_began = phase, now
        self._progress = MappingProxyType({})

    def _end_phase(self, now: float) -> None:
        """Add what the phase took: a start may come back to one."""
        spent = self._phase_times.get(self.phase, 0.0)
        self._phase_times[self.phase] = spent + now - self._phase_began

    def begin_restart(self) -> None:
        """Be as before the first start, from the engine phase on."""
        self._began = self._phase_began = time.monotonic()
        self._phase_times.clear()
        self.become(State.PENDING)
        self.phase = Phase.ENGINE
        self._engine_began = self._began
        self._progress = MappingProxyType({})

    def report_progress(self, progress: Mapping[str, object]) -> None:
        """Keep the numbers of a running download for `/ping` and the metrics, from any thread."""
        self._progress = self.download = progress

    def become(self, state: State) -> None:
        """Enter `state`; once draining or failed, there is no way back to healthy."""
        if self.state not in (State.DRAINING, State.FAILED) or state is State.FAILED:
            if self.state is State.PENDING:
                self._end_phase(time.monotonic())
            self.state = state
            for tell in self.on_state:
                tell(state)

    def ping(self) -> tuple[int, dict[str, Any]]:
        """Return the status and body of `/ping`."""
        if not self.has_model:
            return 200, {}
        entry: dict[str, Any] = {"status": str(self.state)}
        if self.state is State.PENDING:
            entry["phase"] = str(self.phase)
            entry["elapsed_seconds"] = round(self.elapsed_seconds, 1)
            entry |= self._progress
        is_fine = self.state is State.HEALTHY and self.error_rates.reached is None
        is_hidden = (self.state is State.FAILED and self.hides_failure) or (
            self.state is State.PENDING and self.is_registered
        )
        return (200 if is_fine or is_hidden else 503), {self.model_name: entry}

    def check_ready(self) -> None:
        """Return when requests may come in.

        Raises:
            NotReadyError: starting, failed or draining; the text says which.
        """
        if self.state is State.PENDING:
            raise NotReadyError(
                f"Model {self.model_name} is not ready: {self.phase} phase, "
                f"{self.elapsed_seconds:.0f} s since start"
            )
        if self.state is State.UNHEALTHY:
            raise NotReadyError(
                f"Model {self.model_name} is not available: the engine makes no progress"
            )
        if self.state is State.FAILED:
            raise NotReadyError(f"Model {self.model_name} is not available: the engine has failed")
        if self.state is State.DRAINING:
            raise NotReadyError(
                f"Model {self.model_name} is draining: the server is shutting down",
                DRAIN_RETRY_SECONDS,
            )

    def check_room(self, count: int = 1) -> None:
        """Return when `count` requests may come in now.

        Raises:
            NotReadyError: see `check_ready`.
            OverloadError: they would pass the limit.
        """
        self.check_ready()
        if self.places.total + count > self.limit:
            raise OverloadError(self.model_name)

    @contextlib.contextmanager
    def admit(self, count: int = 1) -> Iterator[None]:
        """Hold `count` places in the queue while the body runs.

        Raises:
            NotReadyError: see `check_ready`.
            OverloadError: the places would pass the limit; nobody admitted is touched.
        """
        self.check_ready()
        self.places.add(count)  # first: of processes that ask at once none goes past the limit
        if self.places.total > self.limit:
            self.places.add(-count)
            raise OverloadError(self.model_name)
        self._in_flight += count
        self._idle.clear()
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            yield
        finally:
            if task is not None:
                self._tasks.discard(task)
            self._in_flight -= count
            self.places.add(-count)
            if not self._in_flight:
                self._idle.set()

    def end_all(self) -> None:
        """Cancel what is in flight; each request still answers, with `shutdown_error`."""
        self._is_ending = True
        for task in tuple(self._tasks):
            task.cancel()
        for tell in self.on_end:
            tell()

    def shutdown_error(self) -> NotReadyError | None:
        """Take back a cancellation that came from `end_all` and return what to answer.

        None when it came from elsewhere: then the client is gone, and nobody wants an answer.
        """
        task = asyncio.current_task()
        if not self._is_ending or task is None or not task.cancelling():
            return None
        task.uncancel()
        return NotReadyError(
            f"Model {self.model_name}: the server shut down before the answer was complete",
            DRAIN_RETRY_SECONDS,
        )

    async def wait_own(self, timeout_seconds: float) -> None:
        """Return when the requests of this process have ended, or the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)

    async def wait_idle(self, timeout_seconds: float) -> bool:
        """Return whether all requests in flight ended within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
                while self.in_flight:  # noqa: ASYNC110 (of other processes, whose events are not ours)
                    await asyncio.sleep(IDLE_POLL_SECONDS)
        return not self.in_flight
