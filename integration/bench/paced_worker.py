"""A CPU worker that gives each step the time it would take on some accelerator.

The demo model shares the processor with the front ends that are measured. A step that is slowed
down to a fixed time leaves them the processor, and each of them keeps up with the engine: one row
for each token, so that costs per token are those of the same work.
"""

import os
import time
from typing import Any, Final

from integration.bench.servers import STEP_VARIABLE
from lmi_vllm.engine.vllm.cpu.worker import GuardedCpuWorker

STEP_SECONDS: Final = float(os.environ.get(STEP_VARIABLE, "0")) / 1e3


class PacedWorker(GuardedCpuWorker):
    """The worker our server uses on CPU, with a lower bound for the time of a step."""

    _due = 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        """As the CPU worker; returns no earlier than a step after it did the last time."""
        result = super().execute_model(scheduler_output)
        now = time.monotonic()
        if now < self._due:
            time.sleep(self._due - now)
        self._due = max(now, self._due) + STEP_SECONDS
        return result
