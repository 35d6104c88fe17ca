"""Keeps one model served: starts its engine, watches it, restarts it as configured."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.factory import freeze_heap, refreeze_heap
from lmi_vllm.errors import LmiError
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.server.context import ServerContext
from lmi_vllm.server.model_files import ReadyFiles
from lmi_vllm.server.model_start import ModelStart
from lmi_vllm.server.sleep import ModelSleep
from lmi_vllm.telemetry.metrics import ENGINE_RESTARTS

logger = logging.getLogger(__name__)

FRONT_ENDS_DIED: Final = "more front-end processes ended than can be replaced over one engine"
FAIL_FAST_CODE: Final = 137
RESTART_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the server ended: its exit code and, for a failure, the reason to print last."""

    code: int
    reason: str = ""
    is_immediate: bool = False  # requests in flight are not waited for


class Supervisor:
    """Runs the engine of one model until it has failed for good."""

    def __init__(
        self,
        context: ServerContext,
        start: ModelStart,
        announce: Callable[[], None],
    ) -> None:
        self._service = context.service
        self._processes = context.processes
        self._clock = context.clock
        self._model = start.model
        self._start = start
        self._server = start.model.settings.server
        self._announce = announce
        self._sleep = ModelSleep(context, start)
        self._engine: Engine | None = None
        self._can_restart = True
        self.ready = asyncio.Event()  # set once the model has answered for the first time

    async def run(self) -> Outcome:
        """Start the model and keep it running; return once that is over.

        Raises:
            StartupError: the first start failed; the text is fit to be printed.
        """
        files = await self._start.prepare()
        runtime = await self._start.start_runtime(files)
        freeze_heap()
        self._begin_service(runtime)
        self.ready.set()
        self._announce()
        failures = 0
        runtime, reason = await self._serve(files, runtime)
        while (failures := failures + 1) <= self._server.retry_threshold:
            if self._service.lifecycle.state is State.DRAINING or not self._can_restart:
                logger.error("%s", reason)
                break  # no request reaches it, or the old engine is still there
            logger.error(
                "%s: restarting the engine (failure %d, retry_threshold %d)",
                reason,
                failures,
                self._server.retry_threshold,
            )
            try:
                runtime = await self._restart(files, runtime)
            except LmiError as error:
                reason = error.text
            else:
                refreeze_heap()
                runtime, reason = await self._serve(files, runtime)
        else:
            logger.error(
                "%s: the engine is not restarted (failure %d, retry_threshold %d)",
                reason,
                failures,
                self._server.retry_threshold,
            )
        return await self._give_up(reason)

    async def drained(self) -> None:
        """Call what follows the last request."""
        for end in self._model.on_drained:
            await end()

    async def leave(self) -> None:
        """Let the parts of the model end."""
        await self._model.leave()

    async def close(self) -> None:
        """End the engine and every process it started."""
        await self._processes.detach()
        if self._engine is not None:
            await self._engine.close()

    async def _serve(self, files: ReadyFiles, runtime: Runtime) -> tuple[Runtime, str]:
        """Return the model and why its engine has failed; in between it may have slept."""
        while not (reason := await self._watch(runtime.engine)):
            try:
                runtime = await self._sleep.through(files, runtime)
            except LmiError as error:
                return runtime, error.text
            refreeze_heap()
            self._begin_service(runtime)
        return runtime, reason

    async def _restart(self, files: ReadyFiles, old: Runtime) -> Runtime:
        self._service.lifecycle.begin_restart()
        await self._processes.detach()
        await old.engine.close()  # its memory must be free before the next one starts
        await self._clock.sleep(RESTART_PAUSE_SECONDS)
        runtime = await self._start.start_runtime(files, old.adapters)
        self._begin_service(runtime)
        ENGINE_RESTARTS.inc()
        logger.info(
            "the engine is back after %.1f s", self._service.lifecycle.start.elapsed_seconds
        )
        return runtime

    def _begin_service(self, runtime: Runtime) -> None:
        self._engine = runtime.engine
        self._service.attach(runtime)
        self._service.lifecycle.set_state(State.HEALTHY)

    async def _watch(self, engine: Engine) -> str:
        """Return why the engine has failed, once it has; nothing where the model rests."""
        dying = asyncio.create_task(engine.wait_until_dead())
        failing = asyncio.create_task(self._processes.failed.wait())
        watches = [
            asyncio.create_task(watch(engine, self._clock)) for watch in self._model.watchdogs
        ]
        sleeping = asyncio.create_task(self._sleep.until_asleep(engine))
        ends = (dying, failing, sleeping, *watches)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if dying.done() and not dying.cancelled():
            self._processes.engine_died()
            return dying.result()
        if not sleeping.cancelled():
            sleeping.result()
            return ""
        for watch in watches:
            if not watch.cancelled():
                return await self._end(engine, watch.result())
        return await self._end(engine, FRONT_ENDS_DIED)

    async def _end(self, engine: Engine, reason: str) -> str:
        """Kill an engine that still runs, so that pending requests are answered; return the reason.

        It must have ended before another engine takes its memory.
        """
        logger.error("the engine is killed: %s", reason)
        self._processes.engine_died()
        self._can_restart = await engine.kill()
        if not self._can_restart:
            logger.error("it cannot be ended without this process: no restart")
        return reason

    async def _give_up(self, reason: str) -> Outcome:
        if self._server.fail_fast:
            return Outcome(FAIL_FAST_CODE, reason, is_immediate=True)
        if not self._server.hides_failure:
            return Outcome(1, reason)
        self._service.lifecycle.set_state(State.FAILED)
        logger.error(
            "%s: every request is refused; the process stays, and /ping says 200, as "
            "SERVING_HEALTH_CHECK_OVERRIDE asks",
            reason,
        )
        await asyncio.Event().wait()  # until a signal ends the process
        return Outcome(1, reason)
