"""Ends front-end processes that hang: the kernel still gives them connections."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Final

from lmi_vllm.features.front_ends.handle import FrontEnd, ProcessEndedError
from lmi_vllm.features.front_ends.shared_counters import SharedCounters

# Until its first engine a process does not report. Its import took two minutes on the busiest
# machine seen.
IMPORT_SECONDS: Final = 600.0
FIRST_JOIN_SECONDS: Final = 180.0
# From then on it reports every half second. One that joins a later engine may be busy for longer,
# with the tokenizer. Requests for a model that wakes wait for it no longer than the last number.
LIVENESS_SECONDS: Final = 15.0
JOIN_SECONDS: Final = 30.0
LATER_JOIN_SECONDS: Final = 5.0
WATCH_SECONDS: Final = 1.0
# Who looks later than that was stopped itself, with all processes: a container that was paused.
PAUSE_SECONDS: Final = 5.0


async def ended_after(seconds: float, process: FrontEnd, work: Awaitable[None]) -> None:
    """Wait for `work` of a process that does not report yet; it is ended if that takes longer.

    Raises:
        ProcessEndedError: it has ended, or is ended.
    """
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        process.end_hanging()
        raise ProcessEndedError("it hung") from None


async def end_hanging(processes: Sequence[FrontEnd], counters: SharedCounters) -> None:
    """Kill processes that fail their liveness check: the kernel still gives them connections."""
    looked, judged_from = time.monotonic(), 0.0
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        last, looked = looked, time.monotonic()
        if looked - last > PAUSE_SECONDS:
            judged_from = looked + JOIN_SECONDS  # each may report first
        if looked < judged_from:
            continue
        for process in processes:
            joins = process.is_asked and not process.is_serving.is_set()
            limit = JOIN_SECONDS if joins else LIVENESS_SECONDS
            if process.has_served and counters.row(process.row).silent_seconds > limit:
                process.end_hanging()
