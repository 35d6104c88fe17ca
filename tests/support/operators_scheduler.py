"""A scheduler of an operator's own, which the engine's process imports by name."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class OperatorsScheduler(AsyncScheduler):  # type: ignore[misc,unused-ignore]
    """As vLLM's, with arguments by name only."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
