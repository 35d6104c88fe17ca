"""What the log says of a start: its plan, a line every few seconds, and all of it on one screen."""

import json
import logging
from dataclasses import dataclass, replace
from typing import Final

from lmi_vllm._version import __version__
from lmi_vllm.clock import Clock
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.origin import DEFAULT_ORIGIN, Origin, OriginKind
from lmi_vllm.server.plan import StartPlan

logger = logging.getLogger(__name__)

MOST_ARGUMENTS: Final = 20  # lines: a terminal has 24
HEARTBEAT_SECONDS: Final = 10
LONGEST_VALUE: Final = 60  # characters
MOST_ADAPTERS: Final = 8


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
        plan, origins = self.plan, self.plan.arguments.origins
        return {
            "version": __version__,
            "model": plan.model.name,
            "source": mask_urls(plan.model.reference),
            "source_origin": str(origins.get("model", DEFAULT_ORIGIN)),
            "engine_arguments": {
                name: {"value": value, "origin": str(origins.get(name, DEFAULT_ORIGIN))}
                for name, value in plan.shown_arguments.items()
            },
            "phase_seconds": self._phases(),
            "adapters": [adapter.name for adapter in self.service.registered_adapters],
            "queue_limit": self.service.queue.limit,
            "url": self.url,
            "curl": self.curl,
        }

    def lines(self) -> list[str]:
        """Return the screen; the URL and the curl line follow on stdout."""
        plan, origins = self.plan, self.plan.arguments.origins
        source = _origin(origins.get("model", DEFAULT_ORIGIN))
        phases = self._phases()
        spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
        return [
            f"lmi_vllm {__version__} serves {plan.model.name}",
            f"  model from {mask_urls(plan.model.reference)}  ({source})",
            *self._argument_lines(),
            f"  adapters: {self._adapters()}; queue: {self.service.queue.limit} places",
            f"  start: {spent}; {sum(phases.values()):.1f} s together",
        ]

    def _argument_lines(self) -> list[str]:
        origins = self.plan.arguments.origins
        given = {
            name: value
            for name, value in self.plan.shown_arguments.items()
            if not origins.get(name, DEFAULT_ORIGIN).is_default and name != "model"
        }
        width = max(map(len, given), default=0)
        lines = [
            f"    {name:<{width}} = {_shown(value)}  ({_origin(origins[name])})"
            for name, value in given.items()
        ]
        if len(lines) > MOST_ARGUMENTS:
            more = len(lines) - MOST_ARGUMENTS
            lines = [*lines[:MOST_ARGUMENTS], f"    and {more} more: see lmi-vllm explain"]
        quiet = len(self.plan.shown_arguments) - len(given)
        return [f"  engine arguments ({quiet} more at their defaults):", *lines]

    def _adapters(self) -> str:
        adapters = self.service.registered_adapters
        names = ", ".join(adapter.name for adapter in adapters[:MOST_ADAPTERS])
        more = len(adapters) - MOST_ADAPTERS
        return (names or "none") + (f" and {more} more" if more > 0 else "")

    def _phases(self) -> dict[str, float]:
        seconds = self.service.lifecycle.start.phase_seconds
        return {str(phase): round(value, 3) for phase, value in seconds.items()}


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _origin(origin: Origin) -> str:
    """Return an origin without the folders of its file: the model's line has them."""
    if origin.kind is not OriginKind.FILE:
        return str(origin)
    return str(replace(origin, name=origin.name.rsplit("/", 1)[-1]))


def log_plan(plan: StartPlan) -> None:
    """Log the model and its source at the beginning; the summary follows when it is ready."""
    arguments = " ".join(
        f"{name}={json.dumps(value, default=str)}"
        for name, value in plan.shown_arguments.items()
        if not plan.arguments.origins.get(name, DEFAULT_ORIGIN).is_default and name != "model"
    )
    reference = mask_urls(plan.model.reference)
    logger.info("model %s from %s; engine arguments: %s", plan.model.name, reference, arguments)


async def log_progress(lifecycle: Lifecycle, clock: Clock, limit_seconds: float) -> None:
    """Log the phase of a long start every few seconds; when it is late, the limits to raise."""
    while True:
        await clock.sleep(HEARTBEAT_SECONDS)
        if lifecycle.state is not State.PENDING:
            continue
        _, body = lifecycle.ping()
        logger.info("starting: %s", json.dumps(body), extra={"fields": {"start": body}})
        if 0 < limit_seconds / 2 < lifecycle.start.engine_seconds:
            logger.warning(
                "half of model_loading_timeout (%g s) has passed; raise it, and on SageMaker the "
                "endpoint's container_startup_health_check_timeout with it",
                limit_seconds,
            )
