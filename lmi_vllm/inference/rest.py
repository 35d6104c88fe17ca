"""The rest of an idle model: who keeps it awake, and requests that wait until it is awake again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from lmi_vllm.clock import Clock
from lmi_vllm.errors import NotReadyError
from lmi_vllm.inference.lifecycle import RETRY_SECONDS, Lifecycle, State, not_ready

STOP: Final = "stop"  # the level that ends the engine; the others are vLLM's
WAKE_SECONDS: Final = 60.0  # that a request waits, unless LMI_WAKE_TIMEOUT says otherwise


class Rest:
    """What requests and calls of one process have to do with the model's sleep.

    The supervisor of the engine reads it: it lets the model sleep while nothing keeps it awake, and
    wakes it once it is `wanted`.
    """

    def __init__(self, lifecycle: Lifecycle, clock: Clock) -> None:
        self.lifecycle = lifecycle
        self.wait_seconds = WAKE_SECONDS
        self.wake_seconds = 0.0  # that the last waking took; 0 before there was one
        self.level = STOP  # LMI_SLEEP_LEVEL
        self.asked = asyncio.Event()  # a call asks for sleep
        self.begun = asyncio.Event()  # the memory is given back
        self.wanted = asyncio.Event()  # by a request or a call
        self.on_wanted: list[Callable[[], None]] = []
        self.calls = 0  # that have kept it awake
        self._held = 0
        self._clock = clock

    @property
    def is_kept_awake(self) -> bool:
        """Whether a call that is no request needs the engine now."""
        return self._held > 0

    def check_engine(self) -> None:
        """Check that there is an engine: it may sleep, but has not ended for its sleep.

        Raises:
            NotReadyError: it has.
        """
        if self.lifecycle.is_resting and self.level == STOP:
            raise not_ready(
                f"Model {self.lifecycle.model_name} is asleep, and its engine has ended: a request "
                "for the model starts it"
            )

    @contextlib.asynccontextmanager
    async def kept_awake(self) -> AsyncIterator[None]:
        """Keep the model awake while the body runs; wakes it first.

        Raises:
            NotReadyError: see `awake`.
        """
        self._held += 1
        self.calls += 1
        try:
            if self.lifecycle.is_resting:
                await self.awake()
            yield
        finally:
            self._held -= 1

    async def fall_asleep(self, seconds: float) -> None:
        """Ask for sleep; return once it has begun, is called off or `seconds` are over."""
        ended = asyncio.Event()  # the model answers again, drains or has failed

        def note(state: State) -> None:
            if state is not State.ASLEEP:
                ended.set()

        self.lifecycle.on_state.append(note)
        if not self.lifecycle.is_resting:
            self.asked.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.begun, ended)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self.lifecycle.on_state.remove(note)
            self.asked.clear()

    async def awake(self) -> None:
        """Wake the model, and return once it answers; what waits holds a slot or keeps it awake.

        Raises:
            NotReadyError: it is not awake in time, could not be woken, or the server drains.
        """
        self.wanted.set()
        for on_wanted in self.on_wanted:
            on_wanted()
        lifecycle = self.lifecycle
        try:
            await self._clock.limit(self.wait_seconds or None, lifecycle.roused.wait())
        except TimeoutError:
            raise self._too_slow() from None
        lifecycle.check_ready()

    def _too_slow(self) -> NotReadyError:
        """Return the refusal; it says to come again when waking is over, as far as that is known.

        The bound may be over before the model has begun to wake: it still falls asleep.
        """
        lifecycle = self.lifecycle
        passed = lifecycle.rest_seconds if lifecycle.state is State.WAKING else 0.0
        is_start = self.level == STOP and not self.wake_seconds  # the first waking
        last = lifecycle.start.again_seconds if is_start else self.wake_seconds
        left = max(RETRY_SECONDS, round(last - passed))
        return not_ready(
            f"Model {lifecycle.model_name} was idle and is waking: it was not ready within "
            f"{self.wait_seconds:g} s (LMI_WAKE_TIMEOUT)",
            left,
        )
