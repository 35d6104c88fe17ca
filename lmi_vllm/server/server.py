"""The server: its port, its model, its end. It ends no process and sets no signal handler."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, MutableMapping

from lmi_vllm.clock import (
    CUT_OFF_ANSWER_SECONDS,
    ENGINE_CLOSE_SECONDS,
    FAILURE_ANSWER_SECONDS,
    FAILURE_REASON_SECONDS,
    Clock,
)
from lmi_vllm.config.setting import CommandLine
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.server.context import (
    ProcessGroup,
    ServerContext,
    ServerEvents,
    log_statistics,
    new_service,
)
from lmi_vllm.server.end_budget import EndBudget, end_seconds
from lmi_vllm.server.listeners import open_listeners
from lmi_vllm.server.model_manager import ModelManager
from lmi_vllm.server.parts import Assembled
from lmi_vllm.server.supervisor import Outcome
from lmi_vllm.telemetry.metrics import DRAINED, DRAINS

logger = logging.getLogger(__name__)


class Server:
    """Serves one model, from an open port to a clean end."""

    def __init__(  # noqa: PLR0913, PLR0917 - one name for each thing that a server is made of
        self,
        assembled: Assembled,
        settings: Settings,
        typed: CommandLine,
        environ: Mapping[str, str],
        engine_factory: EngineFactory,
        exports: MutableMapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._clock = clock = clock or Clock()
        self.service = new_service(settings, clock)
        self._assembled = assembled
        configuration, parts = assembled.configuration, assembled.parts
        self._events = ServerEvents()
        self._processes = parts.processes.value(self.service, settings, environ) or ProcessGroup()
        context = ServerContext(
            configuration, parts.start, self.service, environ, exports, engine_factory,
            self._processes, clock, self._events,
        )  # fmt: skip
        self._models = ModelManager(
            context, settings, typed, parts.without_model.value, parts.model_parts
        )
        self._budget = EndBudget(clock)
        self._cut = 0  # requests that the end of the server has ended

    async def run(self, stop: asyncio.Event) -> tuple[int, str]:
        """Serve until `stop` is set, a start fails or the engine fails; return code and reason.

        If `stop` is set again while requests are drained, they end at once.
        """
        features = contextlib.AsyncExitStack()
        try:
            await self._enter(features)
            outcome = await self._serve(stop)
            return outcome.code, outcome.reason
        finally:
            try:
                await self._budget.within(self._models.leave(), "the end of what a model has")
                await self._budget.within(features.aclose(), "the end of features")
            finally:
                self._processes.remove()

    async def _enter(self, features: contextlib.AsyncExitStack) -> None:
        service, settings = self.service, self._settings
        for run in self._assembled.parts.lifespans:
            lifespan = run(service, settings, self._environ, self._events)
            await features.enter_async_context(lifespan)
        seconds = settings.server.lmi_stats_interval
        logging_often = asyncio.create_task(log_statistics(service, seconds, self._clock))
        features.callback(logging_often.cancel)

    async def _serve(self, stop: asyncio.Event) -> Outcome:
        listeners = await open_listeners(
            self.service,
            self._settings,
            self._environ,
            self._assembled.parts.routes,
            self._assembled.configuration.make_tls,
            self._models.explained,
            self._processes.first_socket,
        )
        self._processes.opened(listeners.address)
        life = asyncio.create_task(self._models.run(listeners.url, listeners.curl, listeners.pages))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        outcome = life.result() if life.done() else Outcome(0)
        stopping.cancel()
        self._budget.begin(end_seconds(self._settings))
        if outcome.is_immediate:
            await listeners.stop()
            return outcome
        if outcome.code:
            self.service.lifecycle.set_state(State.FAILED)
            await self.service.queue.wait_idle(FAILURE_ANSWER_SECONDS)
        else:
            stop.clear()
            await self._pause(stop)
            had_engine = await self._has_engine()
            await self._drain(stop)
            if had_engine and not await self._has_engine():  # its death has ended the drain
                reason = asyncio.create_task(self._clock.sleep(FAILURE_REASON_SECONDS))
                await asyncio.wait({life, reason}, return_when=asyncio.FIRST_COMPLETED)
                reason.cancel()
            life.cancel()
        within = self._budget.within
        for end in self._models.on_drained:
            await within(end(), "what follows the last request")
        await self._close_engine(stop)
        await within(self._processes.end(), "the end of the other front ends")
        await within(listeners.close(), "the end of connections")
        self._say_what_was_done(outcome)
        return outcome

    def _say_what_was_done(self, outcome: Outcome) -> None:
        done = self.service.telemetry.totals.in_words(self._cut)
        if done or not outcome.code:  # a start that failed has its reason to say, and no more
            logger.info("ended: %s", done or "no request came")

    async def _pause(self, stop: asyncio.Event) -> None:
        """Serve on for a while with a readiness of 503, so that balancers send no more requests."""
        lifecycle, server = self.service.lifecycle, self._settings.server
        seconds = min(server.lmi_shutdown_delay, server.shutdown_timeout)
        if not seconds or not lifecycle.takes_requests:
            return
        lifecycle.announce_end()
        logger.info("shutting down in %g s (LMI_SHUTDOWN_DELAY): not ready, but serving", seconds)
        again = asyncio.create_task(stop.wait())
        over = asyncio.create_task(self._clock.sleep(seconds))
        await asyncio.wait({again, over}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        over.cancel()

    async def _drain(self, stop: asyncio.Event) -> None:
        """Refuse new requests, and wait for running ones until the deadline or a second signal."""
        queue = self.service.queue
        self.service.lifecycle.set_state(State.DRAINING)
        seconds = self._settings.server.shutdown_timeout
        seconds = max(0.0, seconds - self._budget.spent)  # a pause is part of them
        logger.info("draining: %d in flight, %.3g s at most", queue.in_flight, seconds)
        DRAINS.inc()
        began_with = queue.in_flight
        again = asyncio.create_task(stop.wait())
        idle = asyncio.create_task(queue.wait_idle(seconds))
        await asyncio.wait({again, idle}, return_when=asyncio.FIRST_COMPLETED)
        DRAINED.labels("completed").inc(began_with - queue.in_flight)
        DRAINED.labels("cut").inc(queue.in_flight)
        self._cut = queue.in_flight
        if queue.in_flight:
            logger.warning("ending %d requests that did not finish", queue.in_flight)
            queue.cancel_all()
            await queue.wait_idle(CUT_OFF_ANSWER_SECONDS)

    async def _has_engine(self) -> bool:
        try:
            if (engine := self.service.loaded_engine) is not None:
                await engine.check_health()
        except EngineDeadError:
            return False
        return engine is not None

    async def _close_engine(self, stop: asyncio.Event) -> None:
        """End the engine within a time limit, and at once after another signal."""
        close = asyncio.create_task(self._models.close())
        again = asyncio.create_task(stop.wait())
        late = asyncio.create_task(self._clock.sleep(self._budget.left(ENGINE_CLOSE_SECONDS)))
        await asyncio.wait({close, again, late}, return_when=asyncio.FIRST_COMPLETED)
        for each in (again, late):
            each.cancel()
