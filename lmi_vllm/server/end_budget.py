"""One budget of time for the whole end of a server, whatever its parts do."""

import logging
from collections.abc import Coroutine
from typing import Any, Final

from lmi_vllm.clock import Clock
from lmi_vllm.config.settings import Settings

logger = logging.getLogger(__name__)

# SageMaker and Kubernetes kill 30 s after SIGTERM. The rest is for the log and the last line.
WHOLE_END_SECONDS: Final = 28.0
AFTER_DRAIN_SECONDS: Final = 3.0  # at least, for error answers, copies and the engine's end


def end_seconds(settings: Settings) -> float:
    """Return how long the end may take after SIGTERM: shutdown_timeout, and what follows it."""
    return max(WHOLE_END_SECONDS, settings.server.shutdown_timeout + AFTER_DRAIN_SECONDS)


class EndBudget:
    """What is left of the time for the end; without a limit until it begins."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: float | None = None
        self._seconds = 0.0

    def begin(self, seconds: float) -> None:
        """Count so many seconds from now on."""
        self._began, self._seconds = self._clock.now(), seconds

    @property
    def spent(self) -> float:
        """Seconds since the end began."""
        return 0.0 if self._began is None else self._clock.now() - self._began

    def left(self, most: float) -> float:
        """Return the seconds that a part may take: `most`, or what is left."""
        return max(0.0, min(most, self._seconds - self.spent))

    async def within(self, part: Coroutine[Any, Any, object], name: str) -> None:
        """Run a part of the end; it is cancelled, and named in the log, when the time is over."""
        left = None if self._began is None else self.left(self._seconds)
        try:
            await self._clock.limit(left, part)
        except TimeoutError:
            logger.warning("%s took longer than the end may: it was not waited for", name)
