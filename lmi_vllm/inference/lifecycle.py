"""The server's lifecycle: its state, and the answers of `/ping` and `/health`."""

import asyncio
import time
from collections.abc import Callable, Container
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from lmi_vllm.errors import Fault, NotReadyError
from lmi_vllm.inference.start_progress import Phase, StartProgress


class State(StrEnum):
    """The status in `/ping`."""

    PENDING = "PENDING"
    HEALTHY = "Healthy"
    UNHEALTHY = "Unhealthy"  # alive, but stalled
    ASLEEP = "Asleep"  # idle for long, or a call has paused the engine or put it to sleep
    WAKING = "Waking"  # a request has asked for the model, which had been idle
    FAILED = "FAILED"
    DRAINING = "DRAINING"


STARTING: Final = (State.PENDING, State.WAKING)
DRAIN_RETRY_SECONDS: Final = 30
RETRY_SECONDS: Final = 5
_REFUSED: Final = MappingProxyType({
    State.UNHEALTHY: "Model {} is not available: the engine makes no progress",
    State.ASLEEP: "Model {} is asleep: POST /wake_up, or /resume after /pause, makes it answer",
    State.FAILED: "Model {} is not available: the engine has failed",
    State.DRAINING: "Model {} is draining: the server is shutting down",
})  # fmt: skip


class Lifecycle:
    """The state of the server and of its model.

    It is made first, so that `/ping` can answer from the first second.
    """

    def __init__(
        self,
        model_name: str = "model",
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.start = StartProgress(now)
        self.state = State.PENDING
        self.model_name = model_name
        self.has_model = True
        self.ping_details: dict[str, object] = {}  # notes that /ping shows beside the status
        # Called with the fault of each error answer, or with its status if the error is not ours.
        self.on_failure: list[Callable[[Fault | int], None]] = []
        self._is_marked_unhealthy = False
        self._is_leaving = False
        self._was_ready = False
        self._hides_failure = False
        self._is_registered = False
        self.is_resting = False  # it sleeps until the next request, or wakes for one
        self.roused = asyncio.Event()  # set while it does not
        self.roused.set()
        self._rest_began = 0.0
        self._is_mirror = False
        self._now = now
        self.on_state: list[Callable[[State], None]] = []  # called with each state

    @property
    def is_serving(self) -> bool:
        """Whether there is a model and it answers requests."""
        return self.has_model and self.state is State.HEALTHY

    @property
    def is_alive(self) -> bool:
        """Whether the model can still become ready without a restart of the process."""
        return self.state is not State.FAILED and not self._is_marked_unhealthy

    @property
    def is_ready(self) -> bool:
        """Whether a balancer should send requests; one that rests is woken by them."""
        return self.takes_requests and not self._is_marked_unhealthy and not self._is_leaving

    @property
    def takes_requests(self) -> bool:
        """Whether requests are answered, or wait until a model that rests is awake."""
        return self.is_serving or (self.has_model and self.is_resting)

    @property
    def rest_seconds(self) -> float:
        """Seconds since the model fell asleep for lack of requests, or began to wake; else 0."""
        return self._now() - self._rest_began if self.is_resting else 0.0

    def note_failure(self, cause: Fault | int) -> None:
        """Report the fault, or the status, of an answer to `on_failure`."""
        for on_failure in self.on_failure:
            on_failure(cause)

    @property
    def shown_state(self) -> State:
        """The state for metrics, which a marked server has not left although `/ping` is 503."""
        is_marked = self._is_marked_unhealthy and self.state is State.HEALTHY
        return State.UNHEALTHY if is_marked else self.state

    def mark_unhealthy(self, reason: str) -> None:
        """Make `/ping` 503 with the reason until the process ends; requests are still answered."""
        self._is_marked_unhealthy = True
        self.ping_details["unhealthy"] = reason

    def announce_end(self) -> None:
        """Make readiness 503 before the drain; requests are still answered."""
        self._is_leaving = True
        self.ping_details["shutting_down"] = True

    def expect_model(self, name: str, *, hides_failure: bool = False) -> None:
        """Set the name of the model that is being started.

        With `hides_failure` (SERVING_HEALTH_CHECK_OVERRIDE) `/ping` is 200 even if the engine has
        failed for good.
        """
        self.model_name, self._hides_failure = name, hides_failure

    def begin_registered(self) -> None:
        """Start a model of POST /models: the server stays healthy while it loads."""
        self.has_model = self._is_registered = True
        self.begin_restart()

    def remove_model(self) -> None:
        """Enter the state of a healthy server without a model."""
        self.has_model = self._is_registered = False
        self.set_state(State.HEALTHY)

    def begin_restart(self) -> None:
        """Return to PENDING, at the engine phase."""
        self.set_state(State.PENDING)
        self.start.restart()

    def fall_asleep(self) -> None:
        """Enter a sleep from which the next request wakes the model; no effect in a drain."""
        self.set_state(State.ASLEEP, is_resting=True)

    def begin_waking(self, *, is_start: bool) -> None:
        """Enter the state in which requests wait; with `is_start` the engine is started again."""
        self.set_state(State.WAKING, is_resting=True)
        if is_start:
            self.start.restart()

    def set_state(self, state: State, *, is_resting: bool = False) -> None:
        """Enter `state`; after draining or failed the server is never healthy again."""
        if self.state not in (State.DRAINING, State.FAILED) or state is State.FAILED:
            if self.state in STARTING:
                self.start.end(is_ready=state is State.HEALTHY)
            self._enter(state, is_resting=is_resting)
            self._was_ready = self._was_ready or state is State.HEALTHY
            for on_state in self.on_state:
                on_state(state)

    def set_asleep(self, *, is_asleep: bool) -> None:
        """Switch between HEALTHY and ASLEEP; other states stay."""
        if is_asleep and self.state is State.HEALTHY:
            self.set_state(State.ASLEEP)
        elif not is_asleep and self.state is State.ASLEEP:
            self.set_state(State.HEALTHY)

    def mirror(self, state: State, *, has_model: bool, is_resting: bool = False) -> None:
        """Copy the state of the process that answers health checks."""
        self.has_model, self._is_mirror = has_model, True
        self._enter(state, is_resting=is_resting)

    def _enter(self, state: State, *, is_resting: bool) -> None:
        """Set the state; those who wait for the model to wake see the new one."""
        self.state, self.is_resting = state, is_resting
        if is_resting:
            self._rest_began = self._now()
            self.roused.clear()
        else:
            self.roused.set()

    def ping(self) -> tuple[int, dict[str, Any]]:
        """Return the status and body of `/ping`."""
        if not self.has_model:
            return 200, {}
        entry: dict[str, Any] = {"status": str(self.state)}
        if self.is_resting:
            entry["seconds"] = round(self.rest_seconds, 1)
        if self.state is State.PENDING or (self.state is State.WAKING and self.start.is_running):
            entry["phase"] = str(self.start.phase)
            if self.start.step and self.start.phase is Phase.ENGINE:
                entry["step"] = self.start.step
                spent = self.start.step_seconds.get(self.start.step, 0.0)
                entry["step_seconds"] = round(spent, 1)
            entry["elapsed_seconds"] = round(self.start.elapsed_seconds, 1)
            if left := round(self.start.seconds_left, 1):
                entry["seconds_left"] = left
            entry |= self.start.progress
        entry |= self.ping_details
        is_fine = self.is_ready
        is_hidden = (self.state is State.FAILED and self._hides_failure) or (
            self.state is State.PENDING and self._is_registered
        )
        return (200 if is_fine or is_hidden else 503), {self.model_name: entry}

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the status and body of `/health`, as of `vllm serve`: 200 while it is alive.

        vLLM opens its port once the model is loaded, and probes wait for that: before the model was
        ready for the first time it is that of `/ping`.
        """
        status, body = self.ping()
        return (200 if self._was_ready and self.is_alive else status), body

    def check_ready(self, also: Container[State] = ()) -> None:
        """Check that requests may be admitted, or that the state is one of `also`.

        They are while the model rests: each then waits until it is awake.

        Raises:
            NotReadyError: starting, asleep, failed or draining; the text says which.
        """
        if self.is_resting or self.state in also:
            return
        if self.state is State.PENDING and self._is_mirror:  # whose start is another process's
            raise not_ready(f"Model {self.model_name} is not ready: its engine starts")
        if self.state is State.PENDING:
            raise not_ready(
                f"Model {self.model_name} is not ready: {self.start.phase} phase, "
                f"{self.start.elapsed_seconds:.0f} s since start"
            )
        if (reason := _REFUSED.get(self.state)) is not None:
            seconds = DRAIN_RETRY_SECONDS if self.state is State.DRAINING else RETRY_SECONDS
            raise not_ready(reason.format(self.model_name), seconds)


def not_ready(text: str, seconds: int = RETRY_SECONDS) -> NotReadyError:
    """Return the refusal; of SageMaker's folder /opt/ml/model the model's name is `model`."""
    return NotReadyError(text.replace("Model model ", "The model ", 1), seconds)
