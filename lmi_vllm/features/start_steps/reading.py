"""Reads the steps of starting engines from a pipe, and enters them in the start's progress."""

import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping

import orjson

from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.vllm.start_steps import ORDER, StepWriter, named_for_children
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_progress import StartProgress
from lmi_vllm.inference.start_words import steps_in_words
from lmi_vllm.server.context import ServerEvents

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def reading_steps(
    service: InferenceService, _: Settings, _environ: Mapping[str, str], events: ServerEvents
) -> AsyncIterator[None]:
    """Follow the starts of the engine, and its restarts, while the body runs.

    A further front-end process starts none: what vLLM logs there are no steps.
    """
    with following(service.lifecycle.start) if events.is_first else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def following(start: StartProgress) -> Iterator[None]:
    """Enter the steps that this process and its children log."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer, handlers = StepWriter(writing), list(logging.getLogger().handlers)
    for handler in handlers:
        writer.watch(handler)
    threading.Thread(
        target=_read, args=(reading, start), name="lmi-vllm-start-steps", daemon=True
    ).start()
    try:
        with named_for_children(writing):
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(writer)
        os.close(writing)  # ends the thread once no engine has it


def _read(descriptor: int, start: StartProgress) -> None:
    with os.fdopen(descriptor, "rb") as lines:
        for line in lines:
            enter(start, *orjson.loads(line))


def enter(start: StartProgress, step: str, figures: Mapping[str, object]) -> None:
    """Enter a step, and log it where it is new; an earlier one comes from another process."""
    running = start.step
    if running and ORDER[step] < ORDER[running]:
        return
    start.enter_step(step, figures)
    if start.step != running:
        before = {name: spent for name, spent in start.step_seconds.items() if name == running}
        after = f" ({steps_in_words(before, start.figures)[0]})" if before else ""
        fields = {"step": step, "seconds_before": round(before.get(running, 0.0), 3)}
        logger.info("starting the engine: %s%s", step, after, extra={"fields": fields})
