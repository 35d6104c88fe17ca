"""torch's profiler on one thread.

vLLM starts the profiler of its front end in one of the event loop's helper threads, and stops it in
whichever is free. What torch records belongs to the thread that began it. Another one stops nothing
and has no trace, and writing that ends the process.

Upstream: not reported that we know of.
Releases: 0.31 and later, with torch 2.13.
Shows: `/start_profile`, requests, `/stop_profile`: SIGSEGV in `ActivityTraceWrapper::save`.
May go: when test_plain_profiler_ends_the_process_of_two_threads fails.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any


class OneThread:
    """A profiler whose sessions begin and end in a thread of its own, whichever one calls."""

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        self._thread = ThreadPoolExecutor(1, "lmi-vllm-profiler")

    def start(self) -> None:
        """Begin; blocks."""
        self._thread.submit(self._profiler.start).result()

    def stop(self) -> None:
        """End, and write the trace; blocks."""
        self._thread.submit(self._profiler.stop).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profiler, name)
