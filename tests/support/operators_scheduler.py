"""A scheduler of an operator's own, which the engine's process imports by name."""

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class OperatorsScheduler(AsyncScheduler):  # type: ignore[misc,unused-ignore]
    """As vLLM's, with arguments by name only."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)


class TalkativeScheduler(OperatorsScheduler):
    """It logs more in a step than a pipe and the queue of the log hold, for some requests."""

    MAX_TOKENS = 7  # of such a request

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """Schedule a step, and say so at length."""
        if any(request.max_tokens == self.MAX_TOKENS for request in self.running):
            for _ in range(1024):
                logging.getLogger("operator").info("%s", "x" * 1024)
        return super().schedule(*arguments, **named)
