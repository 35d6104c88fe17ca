"""The running server: port, signals, model start, drain. No room ends the process but this one."""

import asyncio
import json
import logging
import signal
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final

from lmi_vllm.config.parsers import error_rate
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import CommandLine, Settings
from lmi_vllm.errors import LmiError, StartupError
from lmi_vllm.extras.front_ends.group import FrontEnds, SeveralFrontEnds
from lmi_vllm.inference.deferred import DEFAULT_CAPACITY, DeferredResults
from lmi_vllm.inference.error_rates import ErrorKind, ErrorRate, ErrorRates
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.model_control import ModelInfo
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.listeners import api_keys, curl_line, open_listeners
from lmi_vllm.server.model_settings import complete_settings
from lmi_vllm.server.model_slot import ModelSlot
from lmi_vllm.server.model_start import ModelStart, StartPlan, plan_start
from lmi_vllm.server.session_store import copy_sessions, sessions_of
from lmi_vllm.server.start_summary import DEFAULT, StartSummary
from lmi_vllm.server.supervisor import FailurePolicy, Outcome, Supervisor
from lmi_vllm.server.telemetry_start import Traces, log_request_metrics, running_telemetry
from lmi_vllm.telemetry.metrics import DRAINED, DRAINS
from lmi_vllm.translate.devices import detect_devices
from lmi_vllm.translate.explain import as_document, explain
from lmi_vllm.translate.traces import ARGUMENT as TRACES_ARGUMENT

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 10
ENGINE_CLOSE_SECONDS: Final = 8.0
FAILURE_ANSWER_SECONDS: Final = 10.0
LAST_WORD_SECONDS: Final = 2.0


class Server:
    """Serves one model from an open port to a clean end."""

    def __init__(
        self,
        settings: Settings,
        typed: CommandLine,
        environ: Mapping[str, str],
        engine_kind: str = "vllm",
    ) -> None:
        self._settings = settings
        self._typed = typed
        self._environ = environ
        self._engine_kind = engine_kind
        self._engines: Supervisor | ModelSlot | None = None  # whoever has one to close
        self._url = ""
        self._traces: Traces
        self._front_ends = FrontEnds()
        self._settings_in_use = settings  # a registered model brings its own

    async def run(self) -> tuple[int, str]:
        """Serve until a signal, a failed start or the engine's death; returns code and reason."""
        lifecycle = Lifecycle(error_rates=ErrorRates(_error_rates(self._settings)))
        limit = int(str(self._settings.server_value("job_queue_size")))
        service = InferenceService(
            RequestQueue(lifecycle, limit), deferred=_deferred_results(self._settings)
        )
        self._traces = Traces(service, self._environ)
        count = int(str(self._settings.server_value("LMI_FRONTEND_PROCESSES")))
        if count > 1:
            self._front_ends = SeveralFrontEnds(count, service, self._environ)
        try:
            async with running_telemetry(service, self._settings, self._environ):
                return await self._run(service)
        finally:
            self._front_ends.remove()

    async def _run(self, service: InferenceService) -> tuple[int, str]:
        stop = _stop_signals()
        listeners = await open_listeners(
            service,
            self._settings,
            self._environ,
            self._explained,
            self._front_ends.first_socket,
        )
        self._url, self._front_ends.address = listeners.url, listeners.address
        life = asyncio.create_task(self._live(service))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        outcome = life.result() if life.done() else Outcome(0)
        if outcome.is_immediate:
            return outcome.code, outcome.reason
        if outcome.code:
            service.lifecycle.become(State.FAILED)
            await service.queue.wait_idle(FAILURE_ANSWER_SECONDS)
        else:
            stop.clear()
            await self._drain(service.queue, stop)
            life.cancel()
        copy = copy_sessions(self._settings, service.sessions, self._environ)
        await self._traces.close()
        await asyncio.gather(copy, self._close_engine(stop))
        await self._front_ends.end()
        await listeners.close()
        return outcome.code, outcome.reason

    async def _live(self, service: InferenceService) -> Outcome:
        """Serve the model; returns only when that is over."""
        heartbeat = asyncio.create_task(_heartbeat(service.lifecycle, self._loading_seconds()))
        try:
            self._settings = await complete_settings(
                self._settings, self._typed, self._environ, service.lifecycle.start
            )
            plan = plan_start(self._settings, self._environ)
            if plan is None:
                return await self._wait_for_models(service)
            self._engines = supervisor = self._supervisor_for(service, plan, self._settings)
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

    async def _wait_for_models(self, service: InferenceService) -> Outcome:
        """Be healthy without a model; POST /models loads one."""
        make = partial(self._supervisor_for, service)
        self._engines = slot = ModelSlot(service, self._typed, self._environ, make)
        service.manage_models(slot)
        print(f"Ready on {self._url} without a model: POST /models loads one", flush=True)
        return await slot.run()

    def _explained(self) -> Mapping[str, object]:
        """Return what `lmi-vllm explain --format json` would print, secrets masked."""
        devices = detect_devices(self._environ)
        explanation, _ = explain(self._settings_in_use, self._environ, devices)
        return as_document(explanation)

    def _loading_seconds(self) -> float:
        return float(str(self._settings.option_value("model_loading_timeout")))

    def _supervisor_for(
        self, service: InferenceService, plan: StartPlan, settings: Settings
    ) -> Supervisor:
        """Return what starts and keeps the planned model; the service knows of it from here on."""
        self._settings_in_use = settings
        policy = _failure_policy(settings)
        service.lifecycle.expect_model(plan.model.name, hides_failure=policy.hides_failure)
        model = _model_info(plan, settings, self._environ, self._engines)
        service.expect(model, plan.profile, sessions_of(settings))
        log_request_metrics(service, settings)
        self._traces.prepare(plan.arguments.values.get(TRACES_ARGUMENT))
        _log_plan(plan)
        start = ModelStart(
            service, settings, self._environ, plan, self._engine_kind, self._front_ends
        )
        return Supervisor(service, start, policy, partial(self._announce, service, plan))

    def _announce(self, service: InferenceService, plan: StartPlan) -> None:
        curl = curl_line(self._url, has_key=bool(api_keys(self._environ)))
        StartSummary(plan, service, self._url, curl).log()
        self._traces.begin()
        phases = {str(name): spent for name, spent in service.lifecycle.start.phase_seconds.items()}
        for tell in service.telemetry.on_ready:
            tell(phases)
        seconds = service.lifecycle.start.elapsed_seconds
        print(f"Ready on {self._url} after {seconds:.1f} s", f"Try: {curl}", sep="\n", flush=True)

    async def _drain(self, queue: RequestQueue, stop: asyncio.Event) -> None:
        """Refuse new work, let running work end within the deadline; a second signal hurries."""
        queue.lifecycle.become(State.DRAINING)
        seconds = float(str(self._settings.server_value("shutdown_timeout")))
        logger.info("draining: %d in flight, %g s at most", queue.in_flight, seconds)
        DRAINS.inc()
        began_with = queue.in_flight
        again = asyncio.create_task(stop.wait())
        idle = asyncio.create_task(queue.wait_idle(seconds))
        await asyncio.wait({again, idle}, return_when=asyncio.FIRST_COMPLETED)
        DRAINED.labels("completed").inc(began_with - queue.in_flight)
        DRAINED.labels("cut").inc(queue.in_flight)
        if queue.in_flight:
            logger.warning("ending %d requests that did not finish", queue.in_flight)
            queue.end_all()
            await queue.wait_idle(LAST_WORD_SECONDS)

    async def _close_engine(self, stop: asyncio.Event) -> None:
        if self._engines is None:
            return
        close = asyncio.create_task(self._engines.close())
        again = asyncio.create_task(stop.wait())
        await asyncio.wait(
            {close, again}, timeout=ENGINE_CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )


def _stop_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def _deferred_results(settings: Settings) -> DeferredResults:
    capacity = settings.server_value("memory_cache_capacity")
    batch = int(str(settings.server_value("cache_batch")))
    return DeferredResults(DEFAULT_CAPACITY if capacity is None else int(str(capacity)), batch)


def _model_info(
    plan: StartPlan, settings: Settings, environ: Mapping[str, str], holder: object
) -> ModelInfo:
    return ModelInfo(
        url=plan.model.reference,
        is_loaded_at_startup=not isinstance(holder, ModelSlot),
        start_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device_type="gpu" if detect_devices(environ).gpu_count else "cpu",
        batch_size=_shown_count(settings, "batch_size", 1),
        max_batch_delay=_shown_count(settings, "max_batch_delay", 100),
        max_idle_time=_shown_count(settings, "max_idle_time", 60),
    )


def _shown_count(settings: Settings, name: str, default: int) -> int:
    """Return a number that is only shown; what is no number counts as not given."""
    text = str(settings.server_value(name))
    return int(text) if text.isdecimal() else default


def _failure_policy(settings: Settings) -> FailurePolicy:
    return FailurePolicy(
        retry_threshold=int(str(settings.server_value("retry_threshold"))),
        fail_fast=bool(settings.server_value("fail_fast")),
        hides_failure=bool(settings.server_value("health_check_override")),
        stall_seconds=float(str(settings.server_value("LMI_STALL_TIMEOUT"))),
    )


def _error_rates(settings: Settings) -> Mapping[ErrorKind, ErrorRate]:
    return {
        kind: ErrorRate(*error_rate(str(text)))
        for kind in ErrorKind
        if (text := settings.server_value(str(kind)))
    }


async def _heartbeat(lifecycle: Lifecycle, limit_seconds: float) -> None:
    """Say every few seconds where a long start is, and which limits to raise when it gets late."""
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
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


def _log_plan(plan: StartPlan) -> None:
    """Say what is being started; the whole table follows when it is ready."""
    arguments = " ".join(
        f"{name}={json.dumps(value, default=str)}"
        for name, value in plan.shown_arguments.items()
        if plan.arguments.origins.get(name, DEFAULT) != DEFAULT and name != "model"
    )
    reference = mask_urls(plan.model.reference)
    logger.info("model %s from %s; engine arguments: %s", plan.model.name, reference, arguments)
