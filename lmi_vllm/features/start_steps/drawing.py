"""Draws a start on a terminal, in one line that moves."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from lmi_vllm.config.settings import Settings
from lmi_vllm.inference.lifecycle import STARTING, Lifecycle
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_words import in_words
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.log_handler import CLEAR, QueuedHandler, can_draw

_LONGEST: Final = "compilation"  # minutes, the first time: is it stuck?
_WHEEL: Final = "|/-\\"
_SECONDS: Final = 0.2  # between two drawings
_COLUMNS: Final = 80  # where the terminal does not say


@contextlib.asynccontextmanager
async def drawing_starts(
    service: InferenceService, _: Settings, environ: Mapping[str, str], events: ServerEvents
) -> AsyncIterator[None]:
    """Draw each start of the engine, and its restarts, while the body runs."""
    handlers = [one for one in logging.getLogger().handlers if isinstance(one, QueuedHandler)]
    if not handlers or not events.is_first or not can_draw(environ):
        yield
        return
    drawing = asyncio.create_task(draw(service.lifecycle, handlers[0]))
    try:
        yield
    finally:
        drawing.cancel()


async def draw(lifecycle: Lifecycle, handler: QueuedHandler) -> None:
    """Draw what a start does, over itself, for as long as this runs.

    A drawing ends where it begins, so that the next line of the log, or of another process,
    replaces it.
    """
    turn, has_drawn = 0, False
    while True:
        is_starting = lifecycle.state in STARTING
        if is_starting or has_drawn:
            turn += 1
            _, body = lifecycle.ping()
            shown = f"{_WHEEL[turn % len(_WHEEL)]} {line(body)}" if is_starting else ""
            handler.queue(f"\r{CLEAR}{shown[: _width() - 1]}\r".encode(), is_urgent=True)
            has_drawn = is_starting
        await asyncio.sleep(_SECONDS)


def line(body: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what `/ping` says of a start: `llama: compilation, 23 s`."""
    return "; ".join(f"{name}: {_status_in_words(status)}" for name, status in body.items())


def _status_in_words(status: Mapping[str, Any]) -> str:
    step = str(status.get("step") or status.get("phase") or status.get("status"))
    words = [step, *in_words(step, status)]
    words.append(f"{status.get('elapsed_seconds') or status.get('seconds', 0):.0f} s")
    if status.get("seconds_left"):
        words.append(f"{status['seconds_left']:.0f} s left")
    if step == _LONGEST and "from_cache" not in status:
        words.append("none with --enforce-eager")
    return ", ".join(words)


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS
    except OSError:
        return _COLUMNS
