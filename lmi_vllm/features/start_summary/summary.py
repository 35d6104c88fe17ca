"""What the log says of a start that is over: all of it on one screen."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm._version import __version__
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.start_words import steps_in_words
from lmi_vllm.messages import Origin, OriginKind
from lmi_vllm.server.context import ModelContext
from lmi_vllm.server.plan import StartPlan

logger = logging.getLogger(__name__)

MAX_SHOWN_ARGUMENTS: Final = 20  # lines: a terminal has 24
LONGEST_VALUE: Final = 60  # characters
MAX_SHOWN_ADAPTERS: Final = 8


@dataclass(frozen=True, slots=True)
class StartSummary:
    """A finished start; the seconds are those of its phases."""

    plan: StartPlan
    service: InferenceService
    url: str
    curl: str

    def log(self) -> None:
        """Log the summary: a screen of text, or JSON fields."""
        logger.info("%s", "\n".join(self.lines()), extra={"fields": self.fields()})

    def fields(self) -> dict[str, object]:
        """Return everything, for the JSON line."""
        plan, origin_of = self.plan, self.plan.arguments.origin_of
        return {
            "version": __version__,
            "model": plan.model.name,
            "source": mask_urls(plan.model.reference),
            "source_origin": str(origin_of("model")),
            "engine_arguments": {
                name: {"value": value, "origin": str(origin_of(name))}
                for name, value in plan.shown_arguments.items()
            },
            "phase_seconds": self._phases(),
            "step_seconds": self._steps(),
            "step_figures": dict(self.service.lifecycle.start.figures),
            "adapters": [adapter.name for adapter in self.service.registered_adapters],
            "queue_limit": self.service.queue.limit,
            "url": self.url,
            "curl": self.curl,
        }

    def lines(self) -> list[str]:
        """Return the screen; the URL and the curl line follow on stdout."""
        plan, origin_of = self.plan, self.plan.arguments.origin_of
        source = _origin(origin_of("model"))
        phases = self._phases()
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
        figures = self.service.lifecycle.start.figures
        steps = ", ".join(steps_in_words(self._steps(), figures))
        return [
            f"lmi_vllm {__version__} serves {plan.model.name}",
            f"  model from {mask_urls(plan.model.reference)}  ({source})",
            *self._argument_lines(),
            f"  adapters: {self._adapters()}; queue: {self.service.queue.limit} slots",
            f"  start: {spent}; {sum(phases.values()):.1f} s together",
            *([f"  engine: {steps}"] if steps else []),
        ]

    def _argument_lines(self) -> list[str]:
        origin_of = self.plan.arguments.origin_of
        given = {
            name: value
            for name, value in self.plan.shown_arguments.items()
            if not origin_of(name).is_default and name != "model"
        }
        width = max(map(len, given), default=0)
        lines = [
            f"    {name:<{width}} = {_shown(value)}  ({_origin(origin_of(name))})"
            for name, value in given.items()
        ]
        if len(lines) > MAX_SHOWN_ARGUMENTS:
            more = len(lines) - MAX_SHOWN_ARGUMENTS
            lines = [*lines[:MAX_SHOWN_ARGUMENTS], f"    and {more} more: see lmi-vllm explain"]
        quiet = len(self.plan.shown_arguments) - len(given)
        return [f"  engine arguments ({quiet} more at their defaults):", *lines]

    def _adapters(self) -> str:
        adapters = self.service.registered_adapters
        names = ", ".join(adapter.name for adapter in adapters[:MAX_SHOWN_ADAPTERS])
        more = len(adapters) - MAX_SHOWN_ADAPTERS
        return (names or "none") + (f" and {more} more" if more > 0 else "")

    def _phases(self) -> dict[str, float]:
        seconds = self.service.lifecycle.start.phase_seconds
        return {str(phase): round(value, 3) for phase, value in seconds.items()}

    def _steps(self) -> dict[str, float]:
        seconds = self.service.lifecycle.start.step_seconds
        return {step: round(value, 3) for step, value in seconds.items()}


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _origin(origin: Origin) -> str:
    """Return an origin without the folders of its file: the model's line has them."""
    if origin.kind is not OriginKind.FILE:
        return str(origin)
    return str(replace(origin, name=origin.name.rsplit("/", 1)[-1]))


@contextlib.asynccontextmanager
async def summarizing(model: ModelContext) -> AsyncIterator[None]:
    """Log the summary of the model's start once it is ready."""
    model.on_ready.append(
        lambda ready: StartSummary(ready.plan, model.service, ready.url, ready.curl).log()
    )
    yield
