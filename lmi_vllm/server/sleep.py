"""Scale to zero: an idle model gives its memory back, and the next request wakes it."""

import asyncio
import contextlib
import logging
from typing import Final

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import EngineDeadError
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.rest import STOP
from lmi_vllm.server.context import ServerContext
from lmi_vllm.server.model_files import ReadyFiles
from lmi_vllm.server.model_start import ModelStart
from lmi_vllm.server.warm_up import warm_up
from lmi_vllm.telemetry.metrics import WAKE_SECONDS

logger = logging.getLogger(__name__)

LOSES_WEIGHTS: Final = "2"
CHECKS_PER_TIME: Final = 4  # of the engine, within one LMI_SLEEP_AFTER_SECONDS
LONGEST_PAUSE: Final = 5.0  # seconds between two of them
ASKED_PAUSE: Final = 0.2  # the same, once a call has asked for sleep


class ModelSleep:
    """Lets the engine of one model rest, and wakes it."""

    def __init__(self, context: ServerContext, start: ModelStart) -> None:
        self._clock = context.clock
        self._processes = context.processes
        self._service = context.service
        self._rest = context.service.rest
        self._lifecycle = context.service.lifecycle
        self._start = start
        server = start.model.settings.server
        self._seconds, self._level = server.lmi_sleep_after_seconds, server.lmi_sleep_level
        self._rest.level = self._level

    async def until_asleep(self, engine: Engine) -> None:
        """Return once the model rests: it was idle for so long, or idle when a call asked for it.

        No request runs then: the state has changed without a pause after the last look.
        """
        rest, queue, now = self._rest, self._service.queue, self._clock.now
        seen, since = (-1, -1), now()
        while True:
            counts = queue.admitted, rest.calls
            is_idle = self._lifecycle.is_ready and not (
                queue.in_flight or rest.is_kept_awake or engine.running_requests
            )
            if counts != seen or not is_idle:
                seen, since = counts, now()
            is_due = self._seconds and now() - since >= self._seconds
            if is_idle and (is_due or rest.asked.is_set()):
                break
            await self._pause()
        rest.asked.clear()
        rest.wanted.clear()
        self._lifecycle.fall_asleep()

    async def _pause(self) -> None:
        """Wait until the next look at the engine, or until a call asks for sleep."""
        if self._rest.asked.is_set():  # it waits for what runs
            await self._clock.sleep(ASKED_PAUSE)
            return
        pause = min(self._seconds / CHECKS_PER_TIME, LONGEST_PAUSE) or None
        with contextlib.suppress(TimeoutError):
            await self._clock.limit(pause, self._rest.asked.wait())

    async def through(self, files: ReadyFiles, runtime: Runtime) -> Runtime:
        """Give the memory back, wait until the model is wanted, and return it awake.

        Raises:
            LmiError: it could not be woken, or its engine has died; requests get an error.
        """
        # A request that another process admitted by the state before is seen here.
        await self._processes.confirm_state()
        if self._service.queue.in_flight or self._rest.wanted.is_set():
            return runtime
        rest, level, began = self._rest, self._level, self._clock.now()
        await self._give_back(level, runtime)
        rest.begun.set()
        logger.info(
            "the model is asleep (LMI_SLEEP_LEVEL=%s), its memory was given back in %.1f s: the "
            "next request wakes it", level, self._clock.now() - began,
        )  # fmt: skip
        try:
            await self._until_wanted(level, runtime.engine)
        finally:
            rest.begun.clear()
        began = self._clock.now()
        logger.info("the model wakes: a request asks for it")
        self._lifecycle.begin_waking(is_start=level == STOP)
        runtime = await self._woken(level, files, runtime)
        rest.wake_seconds = self._clock.now() - began
        WAKE_SECONDS.observe(rest.wake_seconds)
        logger.info("the model is awake after %.1f s", rest.wake_seconds)
        return runtime

    async def _give_back(self, level: str, runtime: Runtime) -> None:
        if level == STOP:
            await self._processes.detach()
            await runtime.engine.close()
            return
        if level == LOSES_WEIGHTS:  # with those of adapters, which are loaded again
            for adapter in runtime.adapters:
                if adapter.ref is not None:
                    await runtime.engine.unload_adapter(adapter.ref)
        await runtime.engine.sleep(int(level))

    async def _until_wanted(self, level: str, engine: Engine) -> None:
        """Return once a request or a call wants the model.

        Raises:
            EngineDeadError: its engine has died meanwhile.
        """
        if level == STOP:
            await self._rest.wanted.wait()
            return
        wanted = asyncio.create_task(self._rest.wanted.wait())
        dying = asyncio.create_task(engine.wait_until_dead())
        try:
            await asyncio.wait({wanted, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise EngineDeadError(f"{dying.result()}, while the model was asleep")
        finally:
            for task in (wanted, dying):
                task.cancel()

    async def _woken(self, level: str, files: ReadyFiles, runtime: Runtime) -> Runtime:
        """Return the model with an engine that has answered."""
        if level == STOP:
            return await self._start.start_runtime(files, runtime.adapters)
        engine = runtime.engine
        await engine.wake_up(int(level))
        if level == LOSES_WEIGHTS:
            await runtime.adapters.move_to(engine)
            await runtime.adapters.publish()
        with engine.uncounted():
            await warm_up(engine)
        return runtime
