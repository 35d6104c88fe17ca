"""Watchdogs of a running engine: of stalls, of idle ones, of numbers that are not finite."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from lmi_vllm.clock import Clock
from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import EngineDeadError, LmiError
from lmi_vllm.features.watchdogs.settings import WatchdogSettings
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.server.context import ModelContext
from lmi_vllm.server.warm_up import warm_up

logger = logging.getLogger(__name__)

MODEL_CORRUPTED: Final = "the model's own answers are not finite any more (NaN)"
ENGINE_HUNG: Final = "the engine completed no step for too long (LMI_STALL_RESTART_TIMEOUT)"
IDLE_ENGINE_REFUSES: Final = "the engine gave no token without other requests"
ANSWER_CHECK_SECONDS: Final = 1.0
REFUSED_PROBES: Final = 2  # one may meet a pause
CHECKS_PER_TIMEOUT: Final = 4  # of the engine, within one LMI_STALL_TIMEOUT


class StallWatchdog:
    """Turns health bad while the engine holds requests and completes no step for `seconds`.

    A stalled engine may come back (a device that hung for a while): health follows its next step.
    By then its requests may have timed out, and new ones are refused: so the watchdog sends a
    probe request of one token. An engine without a step for `fatal_seconds` (0 is never) hangs,
    and is to be replaced.
    """

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        seconds: float,
        clock: Clock,
        fatal_seconds: float = 0.0,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._fatal_seconds = fatal_seconds
        self._clock = clock
        self._progress = engine.progress
        self._since = self._looked = clock.now()
        self._probe: asyncio.Task[None] | None = None

    async def run(self) -> str:
        """Return why the engine has to be replaced, once it has."""
        try:
            while not self._update_health():
                await self._clock.sleep(self._seconds / CHECKS_PER_TIMEOUT)
        finally:
            if self._probe is not None:
                self._probe.cancel()
        return ENGINE_HUNG

    def _update_health(self) -> bool:
        """Set the state by the engine's progress; return whether it hangs and is to be replaced."""
        now = self._look()
        is_stalled = self._lifecycle.state is State.UNHEALTHY
        if self._engine.progress != self._progress:
            self._progress, self._since = self._engine.progress, now
            if is_stalled:
                logger.warning("the engine makes progress again")
                self._lifecycle.set_state(State.HEALTHY)
        elif is_stalled:
            if self._fatal_seconds and now - self._since >= self._fatal_seconds:
                return True
            if self._probe is None or (self._probe.done() and not self._engine.running_requests):
                self._probe = asyncio.create_task(_probe_engine(self._engine))
        elif not self._engine.running_requests or self._lifecycle.state is State.ASLEEP:
            self._since = now  # also while it sleeps with requests that it keeps
        elif now - self._since >= self._seconds and self._lifecycle.state is State.HEALTHY:
            logger.error(
                "the engine holds %d requests and has completed no step for %.0f s "
                "(LMI_STALL_TIMEOUT)",
                self._engine.running_requests,
                now - self._since,
            )
            self._lifecycle.set_state(State.UNHEALTHY)
        return False

    def _look(self) -> float:
        """Return the time; none passes for an engine while the server is stopped with it."""
        now, last = self._clock.now(), self._looked
        self._looked = now
        if now - last > self._seconds / 2:  # twice as long as between two looks
            self._since += now - last
        return now


class IdleProbe:
    """Asks an engine that has had no request for `seconds` for a token, which no metric counts.

    A device or an engine that hangs without a request is else seen by the next client. The answer
    that does not come is a stall, which the other watchdog sees. An engine that refuses twice has
    failed.
    """

    def __init__(self, engine: Engine, lifecycle: Lifecycle, seconds: float, clock: Clock) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._clock = clock

    async def run(self) -> str:
        """Return why the engine has to be replaced, once it has."""
        refused = 0
        while refused < REFUSED_PROBES:
            if not refused:
                await self._wait_until_idle()
            try:
                with self._engine.uncounted():
                    await warm_up(self._engine)
            except LmiError as error:
                if isinstance(error.__cause__, EngineDeadError):
                    await asyncio.Event().wait()  # the supervisor sees that itself
                # A pause ends it, too.
                refused = refused + 1 if self._lifecycle.state is State.HEALTHY else 0
                logger.error("an engine without requests gave no token: %s", error)
            else:
                refused = 0
        return IDLE_ENGINE_REFUSES

    async def _wait_until_idle(self) -> None:
        """Return once the engine has served nothing for so long, and could."""
        progress, since = self._engine.progress, self._clock.now()
        while True:
            await self._clock.sleep(self._seconds / CHECKS_PER_TIMEOUT)
            is_busy = self._engine.running_requests or self._engine.progress != progress
            if is_busy or self._lifecycle.state is not State.HEALTHY:
                progress, since = self._engine.progress, self._clock.now()
            elif self._clock.now() - since >= self._seconds:
                return


class AnswerWatchdog:
    """Repeats the warm-up after a request to the base model gave numbers that are not finite (NaN).

    A single prompt may overflow half precision. If the warm-up fails in the same way, the engine
    itself is corrupted, and the supervisor replaces it.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def run(self) -> str:
        """Return why the engine has to be replaced, once it has."""
        known = 0
        while True:
            await self._clock.sleep(ANSWER_CHECK_SECONDS)
            if self._engine.not_finite != known:
                known = self._engine.not_finite
                if await self._is_corrupted(known):
                    return MODEL_CORRUPTED

    async def _is_corrupted(self, known: int) -> bool:
        logger.error(
            "a request to the base model had NaN or infinite numbers: the warm-up is repeated"
        )
        try:
            with self._engine.uncounted():
                await warm_up(self._engine)
        except LmiError as error:
            logger.error("%s", error.text)
            return self._engine.not_finite != known  # else it failed for another reason
        return False


async def _probe_engine(engine: Engine) -> None:
    try:
        with engine.uncounted():
            await warm_up(engine)
    except LmiError as error:
        logger.warning("the stalled engine gave no token: %s", error)


@contextlib.asynccontextmanager
async def watching(model: ModelContext) -> AsyncIterator[None]:
    """Watch each engine of a model as its settings ask for it."""
    asked, lifecycle = model.settings.feature(WatchdogSettings), model.service.lifecycle

    async def stalls(engine: Engine, clock: Clock) -> str:
        seconds, hang = asked.lmi_stall_timeout, asked.hang_seconds
        return await StallWatchdog(engine, lifecycle, seconds, clock, hang).run()

    async def answers(engine: Engine, clock: Clock) -> str:
        return await AnswerWatchdog(engine, clock).run()

    async def idle(engine: Engine, clock: Clock) -> str:
        return await IdleProbe(engine, lifecycle, asked.lmi_idle_probe_interval, clock).run()

    if asked.lmi_stall_timeout:
        model.watchdogs.append(stalls)
    model.watchdogs.append(answers)
    if asked.lmi_idle_probe_interval:
        model.watchdogs.append(idle)
    yield
