"""The steps of an engine's start, read from records of vLLM's log in any of its processes.

This module imports no vLLM: the server reads the steps before it is there.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import orjson

# Where a process that was not forked writes its steps.
STEPS_VARIABLE: Final = "LMI_VLLM_START_STEPS"


FIRST: Final = "import"
# Messages of vLLM 0.31 to 0.33 with which a step begins; groups of the text are figures (a text
# that is no number is true). In the order of a start: a step is never followed by an earlier one.
MARKS: Final = (
    (FIRST, r"^importing vLLM$"),
    ("configuration", r"^Resolved architecture"),
    ("set-up", r"^Initializing a V1 LLM engine"),
    ("weights", r"^Starting to load model"),
    ("weights", r"checkpoint shards.*?\b(?P<weight_files>\d+)/(?P<weight_files_total>\d+)"),
    ("profile", r"^Loading weights took"),
    ("profile", r"^Model loading took (?P<weights_gib>[\d.]+) GiB"),
    ("compilation", r"Starting torch\.compile|^Warming up model for the compilation"),
    ("compilation", r"Directly load (?P<from_cache>the compiled graph|AOT compilation)"),
    ("compilation", r"(?P<compiled>Compiling a graph for|saved AOT compiled function)"),
    ("KV cache", r"^Available KV cache memory: (?P<kv_cache_gib>[\d.]+) GiB"),
    ("KV cache", r"KV cache size: (?P<kv_cache_tokens>[\d,]+) tokens"),
    ("graphs", r"Capturing CUDA graphs.*?\b(?P<graphs>\d+)/(?P<graphs_total>\d+)"),
    ("graphs", r"^Graph capturing finished"),
    ("application", r"^init engine \("),
)
ORDER: Final[Mapping[str, int]] = MappingProxyType(
    {step: place for place, step in enumerate(dict.fromkeys([FIRST, *(step for step, _ in MARKS)]))}
)
_LOGGERS: Final = ("vllm.", "tqdm", "lmi_vllm.engine.vllm.factory")


def step_of(record: logging.LogRecord) -> tuple[str, Mapping[str, float | bool]] | None:
    """Return the step that a record begins or is within, and its figures; None for most."""
    if not record.name.startswith(_LOGGERS):
        return None
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # arguments that its text does not take: the handler says so
        return None
    for step, mark in MARKS:
        if found := re.search(mark, text):
            return step, {name: _figure(value) for name, value in found.groupdict().items()}
    return None


def _figure(text: str) -> float | bool:
    """Return a number, or that the text is there."""
    return float(text.replace(",", "")) if text[0].isdecimal() else True


class StepWriter(logging.Filter):
    """Writes the steps of this process and of those forked from it to a pipe; drops no record."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def filter(self, record: logging.LogRecord) -> bool:
        """Write a step in one line, which never waits: a full pipe has no room for it."""
        if (found := step_of(record)) is not None:
            with contextlib.suppress(OSError):  # full, or the server is gone
                os.write(self._descriptor, orjson.dumps(found) + b"\n")
        return True

    def watch(self, handler: logging.Handler) -> None:
        """See every record of a handler, before a filter of its that drops some."""
        handler.filters.insert(0, self)


@contextlib.contextmanager
def named_for_children(descriptor: int) -> Iterator[None]:
    """Let processes that are not forked find the pipe while the body runs."""
    os.environ[STEPS_VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"
    try:
        yield
    finally:
        del os.environ[STEPS_VARIABLE]


def watch_as_the_server(handler: logging.Handler, environ: Mapping[str, str]) -> None:
    """Write the steps of a process that was not forked; nothing without the server's pipe."""
    with contextlib.suppress(KeyError, OSError):  # on another machine, without /proc
        descriptor = os.open(environ[STEPS_VARIABLE], os.O_WRONLY | os.O_NONBLOCK)
        StepWriter(descriptor).watch(handler)
