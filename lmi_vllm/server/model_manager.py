"""The lifecycle of a server's model: the configured one, or those that are registered later."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import LmiError, StartupError
from lmi_vllm.server.context import (
    ModelContext,
    ModelPart,
    ReadyModel,
    ServerContext,
    log_progress,
)
from lmi_vllm.server.model_settings import planned
from lmi_vllm.server.model_start import ModelStart
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.server.supervisor import Outcome, Supervisor
from lmi_vllm.telemetry.log_handler import print_lines
from lmi_vllm.telemetry.terminal import ready_lines
from lmi_vllm.translate.arguments import Translation
from lmi_vllm.translate.devices import detect_devices
from lmi_vllm.translate.explain import as_document

logger = logging.getLogger(__name__)


class ModelRun(Protocol):
    """One model with its supervisor, or the slot for models that are registered later."""

    async def run(self) -> Outcome:
        """Return the outcome with which the server ends because of a model."""
        ...

    async def close(self) -> None:
        """End the engine, if there is one."""
        ...


MakeSupervisor = Callable[[StartPlan, Settings], Awaitable[Supervisor]]
WithoutModel = Callable[[ServerContext, CommandLine, MakeSupervisor], ModelRun]


class ModelManager:
    """Starts the configured model, supervises it, and closes it."""

    def __init__(
        self,
        context: ServerContext,
        settings: Settings,
        typed: CommandLine,
        without_model: WithoutModel,
        parts: Sequence[ModelPart] = (),
    ) -> None:
        self._context = context
        self._settings = settings
        self._typed = typed
        self._without_model = without_model
        self._parts = parts
        self._running: ModelRun | None = None  # it has an engine to close
        self._start: ModelStart | None = None  # also for a registered model
        self._url = self._curl = ""
        self._pages: Sequence[str] = ()

    async def run(self, url: str, curl: str, pages: Sequence[str] = ()) -> Outcome:
        """Serve at `url`; returns once that is over.

        `curl` is a command that sends a request, `pages` are lines that name those for browsers.
        """
        context, settings = self._context, self._settings
        lifecycle = context.service.lifecycle
        seconds = settings.model.model_loading_timeout
        heartbeat = asyncio.create_task(log_progress(lifecycle, context.clock, seconds))
        self._url, self._curl, self._pages = url, curl, pages
        try:
            plan, settings = await planned(context, settings, self._typed)
            if plan is None:
                return await self._wait_for_models()
            self._running = supervisor = await self._supervisor_for(plan, settings)
            return await supervisor.run()
        except StartupError as error:
            return Outcome(1, error.text)
        except LmiError as error:
            return Outcome(1, f"start-up failed: {error.text}")
        except Exception as error:
            logger.exception("start-up failed")
            return Outcome(1, f"start-up failed: {type(error).__name__}: {error}")
        finally:
            heartbeat.cancel()

    @property
    def on_drained(self) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        """What follows the last request; to be awaited one after the other."""
        return () if self._start is None else tuple(self._start.model.on_drained)

    async def close(self) -> None:
        """End the engine, if there is one."""
        if self._running is not None:
            await self._running.close()

    async def leave(self) -> None:
        """Let the parts of the model end."""
        if self._start is not None:
            await self._start.model.leave()

    def explained(self) -> Mapping[str, object]:
        """Return what `lmi-vllm explain --format json` would print, secrets masked."""
        translation = self._unplanned if self._start is None else self._start.translation
        return as_document(self._context.configuration.explain(translation))

    @cached_property
    def _unplanned(self) -> Translation:
        """The translation of the settings while no start is planned."""
        environ = self._context.environ
        translate = self._context.configuration.translator.translate_start
        return translate(self._settings, environ, detect_devices(environ))

    async def _wait_for_models(self) -> Outcome:
        """Serve as a healthy server without a model; POST /models loads one."""
        self._running = slot = self._without_model(self._context, self._typed, self._supervisor_for)
        print_lines(f"Ready on {self._url} without a model: POST /models loads one")
        return await slot.run()

    async def _supervisor_for(self, plan: StartPlan, settings: Settings) -> Supervisor:
        """Return the planned model's supervisor; from then on the service knows the model."""
        context, service = self._context, self._context.service
        model = ModelContext(
            service, settings, plan.arguments, context.environ, context.configuration.sources,
            publish=context.processes.publish,
        )  # fmt: skip
        await model.enter(self._parts)
        service.lifecycle.expect_model(plan.model.name, hides_failure=settings.server.hides_failure)
        service.queue.resize(settings.server.job_queue_size)  # the model may have it
        service.rest.wait_seconds = settings.server.lmi_wake_timeout
        service.expect(plan.model.reference, plan.translation.profile)
        plan.log()
        self._start = start = ModelStart(context, model, plan)
        return Supervisor(context, start, lambda: self._announce(start))

    def _announce(self, started: ModelStart) -> None:
        start, url, curl = self._context.service.lifecycle.start, self._url, self._curl
        phases = {str(name): spent for name, spent in start.phase_seconds.items()}
        for notify in (*self._context.events.on_ready, *started.model.on_ready):
            notify(ReadyModel(started.plan, phases, url, curl))
        seconds = start.elapsed_seconds
        print_lines(*ready_lines(url, seconds, curl, self._pages, self._context.environ))
