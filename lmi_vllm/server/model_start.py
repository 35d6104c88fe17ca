"""From a plan to a ready model: files, engine, adapters, one real answer."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.engine.base import Engine, start_error
from lmi_vllm.errors import EngineStartError, LmiError
from lmi_vllm.inference.context import Runtime
from lmi_vllm.inference.start_progress import Phase
from lmi_vllm.messages import EngineArguments, ModelArtifacts
from lmi_vllm.server.adapter_start import load_adapters
from lmi_vllm.server.code_start import ModelCode, code_loader
from lmi_vllm.server.context import ModelContext, ServerContext
from lmi_vllm.server.model_files import ModelFetch, ReadyFiles
from lmi_vllm.server.plan import StartPlan
from lmi_vllm.server.start_parts import AroundStart, PlannedStart
from lmi_vllm.server.warm_up import how_it_died, warm_up

logger = logging.getLogger(__name__)

AUTO: Final = -1  # max_model_len: as memory allows, each time


class ModelStart:
    """Starts one model: prepared once, its engine as often as needed."""

    def __init__(self, context: ServerContext, model: ModelContext, plan: StartPlan) -> None:
        self._context = context
        self.model = model
        self._settings = model.settings
        self.plan = plan
        self._progress = context.service.lifecycle.start
        self._files = ModelFetch(
            plan.model,
            plan.translation,
            context.configuration,
            context.start_parts,
            context.environ,
            lambda progress: self._progress.report(asdict(progress)),
        )
        self.translation = plan.translation  # the final one from `prepare` on
        self._code: ModelCode | None = None
        self._served_length = 0
        self._around: tuple[AroundStart, ...] = ()

    async def prepare(self) -> ReadyFiles:
        """Fetch the model while the engine is imported; return the files for the engine.

        Raises:
            StartupError: the reason, fit to be printed.
        """
        self._progress.enter(Phase.DOWNLOAD)
        self._export(self.plan.exports)
        if not self._context.engine_factory.reads_model and not self.plan.model.is_local:
            return ReadyFiles(self.plan.model, self.plan.translation)
        imports_last = await self._files.install_first()
        self._around = await asyncio.to_thread(self._extensions)
        for each in self._around:
            self._export(each.exports)
        preparing = asyncio.gather(*(each.before_engine() for each in self._around))
        if imports_last:
            ready = await self._fetch()
            await self._load_engine()
        else:  # both run at once
            ready, _ = await asyncio.gather(self._fetch(), self._load_engine())
        await preparing
        await self._check_code(ready)
        self._export(ready.exports)
        self.translation = ready.translation
        return ready

    async def start_runtime(
        self, ready: ReadyFiles, adapters: AdapterRegistry | None = None
    ) -> Runtime:
        """Return a running engine with its adapters, after one real answer.

        `adapters` are those of an engine before this one; without them the settings' adapters load.

        Raises:
            StartupError: the reason, fit to be printed.
        """
        self._progress.enter(Phase.ENGINE)
        seconds = self._settings.model.model_loading_timeout
        try:
            return await self._context.clock.limit(
                seconds or None, self._start_runtime(ready, adapters)
            )
        except TimeoutError:
            self._context.engine_factory.abandon()  # one that starts later would not be ended
            raise EngineStartError(
                f"the model was not ready within model_loading_timeout ({seconds:g} s), "
                f"in phase {self._progress.phase}"
            ) from None

    async def _start_runtime(self, ready: ReadyFiles, adapters: AdapterRegistry | None) -> Runtime:
        processes = self._context.processes
        processes.begin(self._settings, ready.arguments)
        try:
            engine = await self._start_engine(ready)
            try:
                return await self._complete(engine, ready, adapters)
            except BaseException as error:
                says_why = isinstance(error, EngineStartError) or not isinstance(error, LmiError)
                reason = "" if says_why else await how_it_died(engine)
                await engine.close()
                if reason:  # an adapter that it did not load is not to blame
                    raise start_error(f"the engine did not start: {reason}") from error
                raise
        except BaseException:
            await processes.detach()
            raise

    async def _complete(
        self, engine: Engine, ready: ReadyFiles, adapters: AdapterRegistry | None
    ) -> Runtime:
        """Load the adapters and the model's code, then let the engine answer."""
        self._progress.enter(Phase.ADAPTERS)
        processes = self._context.processes
        if self._code is None:  # a restarted engine finds it loaded
            self._code = await self._load_code(engine, ready)
        if adapters is None:
            adapters = await load_adapters(
                ready, self._context.configuration, self.model, engine, self._code.load_adapter
            )
        else:
            await adapters.move_to(engine)
        self._progress.enter(Phase.WARM_UP)
        has_top_logprobs = ready.arguments.values.get("max_logprobs") != 0
        with engine.uncounted():
            await warm_up(engine, has_top_logprobs=has_top_logprobs)
        await self._code.begin(engine)
        await processes.join(engine, ready.translation.profile, adapters)
        for each in self._around:
            each.after_ready()
        profile = replace(ready.translation.profile, task=engine.task)
        return Runtime(engine, profile, adapters, self._code.hooks, self.model.steps)

    def _extensions(self) -> tuple[AroundStart, ...]:
        """The hooks of features around this start."""
        planned = self._planned(self.plan.model, self.plan.arguments)
        made = (make(planned) for make in self._context.start_parts.around)
        return tuple(each for each in made if each is not None)

    def _planned(self, model: ModelArtifacts, arguments: EngineArguments) -> PlannedStart:
        return PlannedStart(
            self._context.engine_factory.kind(arguments),
            self._settings,
            self._context.environ,
            model,
            arguments,
            self._context.configuration.sources,
            self._progress,
        )

    def _export(self, variables: Mapping[str, str]) -> None:
        self._context.exports.update(variables)

    async def _fetch(self) -> ReadyFiles:
        ready = await self._files.fetch()
        self._progress.enter(Phase.ENGINE)  # whose import may still run
        there = self._planned(ready.model, ready.arguments)
        for on_files in self._context.start_parts.on_files:
            await asyncio.to_thread(on_files, there)
        return ready

    async def _load_engine(self) -> None:
        try:
            await self._context.engine_factory.load(self.plan.arguments)
        except EngineStartError as error:
            raise type(error)(self._files.with_failures(error.text)) from error

    async def _start_engine(self, ready: ReadyFiles) -> Engine:
        path = Path(ready.model.model)
        is_there = not path.is_absolute() or await asyncio.to_thread(path.exists)
        if not is_there:  # vLLM would take it for a hub's id
            raise EngineStartError(f"the model's files are gone: {path} does not exist any more")
        clients = self._context.processes.new_clients()
        arguments = replace(ready.arguments, served_length=self._served_length)
        try:
            engine = await self._context.engine_factory.start(
                arguments, ready.translation.profile, clients
            )
        except EngineStartError as error:
            raise type(error)(self._files.with_failures(error.text)) from error
        model = self._settings.model
        if not (model.details.max_model_len.is_set and model.max_model_len == AUTO):
            self._served_length = max(self._served_length, engine.max_model_len)
        return engine

    async def _check_code(self, ready: ReadyFiles) -> None:
        """Check the code of a fetched model before the engine starts."""
        settings, environ = self._settings, self._context.environ
        check = code_loader(settings, self._context.start_parts.code.value).check
        for warning in await asyncio.to_thread(check, settings, ready.model, environ):
            if not self.plan.model.is_local:  # else it was logged as the start was planned
                logger.warning("%s", warning)

    async def _load_code(self, engine: Engine, ready: ReadyFiles) -> ModelCode:
        settings, environ = self._settings, self._context.environ
        return await code_loader(settings, self._context.start_parts.code.value).load(
            settings, environ, ready.model, ready.translation.profile, engine
        )
