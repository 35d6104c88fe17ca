"""A scheduler of an operator's own, which the engine's process imports by name."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class OperatorsScheduler(AsyncScheduler):  # type: ignore[misc,unused-ignore]
    """As vLLM's."""
