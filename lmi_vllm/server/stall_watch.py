"""Notice an engine that is alive and gets nowhere (LMI_STALL_TIMEOUT)."""

import asyncio
import logging
import time
from typing import Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import LmiError
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.server.model_start import warm_up

logger = logging.getLogger(__name__)

CHECKS: Final = 4  # looks at the engine within one stall time


class StallWatch:
    """Turns health bad while the engine holds requests and completes no step for `seconds`.

    A stalled engine may come back (a device that hung for a while): health follows its next step.
    By then its requests may have timed out, and new ones are refused: so it is given a token of
    our own to come back with.
    """

    def __init__(self, engine: Engine, lifecycle: Lifecycle, seconds: float) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._seconds = seconds
        self._progress = engine.progress
        self._since = time.monotonic()
        self._probe: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Watch until cancelled; 0 seconds is no watch at all."""
        if not self._seconds:
            return
        try:
            while True:
                await asyncio.sleep(self._seconds / CHECKS)
                self._look()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    def _look(self) -> None:
        now = time.monotonic()
        is_stalled = self._lifecycle.state is State.UNHEALTHY
        if self._engine.progress != self._progress:
            self._progress, self._since = self._engine.progress, now
            if is_stalled:
                logger.warning("the engine makes progress again")
                self._lifecycle.become(State.HEALTHY)
        elif is_stalled:
            if self._probe is None or (self._probe.done() and not self._engine.running_requests):
                self._probe = asyncio.create_task(_ask(self._engine))
        elif not self._engine.running_requests:
            self._since = now
        elif now - self._since >= self._seconds and self._lifecycle.state is State.HEALTHY:
            logger.error(
                "the engine holds %d requests and has completed no step for %.0f s "
                "(LMI_STALL_TIMEOUT)",
                self._engine.running_requests,
                now - self._since,
            )
            self._lifecycle.become(State.UNHEALTHY)


async def _ask(engine: Engine) -> None:
    try:
        await warm_up(engine)
    except LmiError as error:
        logger.warning("the stalled engine gave no token: %s", error)
