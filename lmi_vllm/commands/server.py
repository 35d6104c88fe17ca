"""The running server: port, signals, model start, drain. No room ends the process but this one."""

import asyncio
import contextlib
import json
import logging
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from lmi_vllm.commands.model_settings import complete_settings
from lmi_vllm.commands.model_start import ModelStart, StartPlan, plan_start
from lmi_vllm.commands.session_store import copy_sessions, sessions_of
from lmi_vllm.commands.supervisor import FailurePolicy, Outcome, Supervisor
from lmi_vllm.errors import Fault, LmiError, StartupError
from lmi_vllm.inference.admission import Admission, State
from lmi_vllm.inference.error_rates import ErrorKind, ErrorRate, ErrorRates
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.startup.masking import mask_urls
from lmi_vllm.startup.settings import CommandLine, Settings
from lmi_vllm.startup.text_parsers import error_rate
from lmi_vllm.web.app import WebOptions, create_app

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS: Final = 10
ENGINE_CLOSE_SECONDS: Final = 8.0
FAILURE_ANSWER_SECONDS: Final = 10.0
LAST_WORD_SECONDS: Final = 2.0
DEFAULT_PORT: Final = 8080


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
        self._supervisor: Supervisor | None = None
        self._url = ""

    async def run(self) -> tuple[int, str]:
        """Serve until a signal, a failed start or the engine's death; returns code and reason."""
        admission = Admission()
        admission.limit = int(str(self._settings.server_value("job_queue_size")))
        admission.error_rates = ErrorRates(_error_rates(self._settings))
        service = InferenceService(admission)
        stop = _stop_signals()
        try:
            runner = await self._listen(service)
        except OSError as error:
            return 1, f"cannot listen on {self._address()}: {error.strerror or error}"
        life = asyncio.create_task(self._live(service))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        outcome = life.result() if life.done() else Outcome(0)
        if outcome.is_immediate:
            return outcome.code, outcome.reason
        if outcome.code:
            admission.become(State.FAILED)
            await admission.wait_idle(FAILURE_ANSWER_SECONDS)
        else:
            stop.clear()
            await self._drain(admission, stop)
            life.cancel()
        copy = copy_sessions(self._settings, service.sessions, self._environ)
        await asyncio.gather(copy, self._close_engine(stop))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(runner.cleanup(), 2)
        return outcome.code, outcome.reason

    async def _listen(self, service: InferenceService) -> web.AppRunner:
        """Open the port; the application answers `/ping` from here on."""
        app = create_app(service, _web_options(self._settings, self._environ))
        # A client that goes away cancels its handler, and with it the engine's work.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        host, port = self._address()
        site = web.TCPSite(runner, host, port, reuse_port=False, backlog=2048)
        await site.start()
        bound_port = runner.addresses[0][1]  # port 0 means any free one
        shown = f"[{host}]" if ":" in host else host
        self._url = f"http://{shown}:{bound_port}"
        print(f"Listening on {self._url}", flush=True)
        return runner

    def _address(self) -> tuple[str, int]:
        address = str(self._settings.server_value("inference_address"))
        parts = urlsplit(address if "//" in address else f"//{address}")
        port = DEFAULT_PORT if parts.port is None else parts.port
        return parts.hostname or "127.0.0.1", port

    async def _live(self, service: InferenceService) -> Outcome:
        """Serve the model; returns only when that is over."""
        heartbeat = asyncio.create_task(_heartbeat(service.admission, self._loading_seconds()))
        try:
            self._settings = await complete_settings(
                self._settings, self._typed, self._environ, service.admission
            )
            plan = plan_start(self._settings, self._environ)
            if plan is not None:
                return await self._serve_model(service, plan)
        except StartupError as error:
            return Outcome(1, error.text)
        except LmiError as error:
            return Outcome(1, f"start-up failed: {error.text}")
        except Exception as error:
            logger.exception("start-up failed")
            return Outcome(1, f"start-up failed: {type(error).__name__}: {error}")
        finally:
            heartbeat.cancel()
        service.admission.has_model = False
        service.admission.become(State.HEALTHY)
        await asyncio.Event().wait()  # until a signal ends the process
        return Outcome(0)

    def _loading_seconds(self) -> float:
        return float(str(self._settings.option_value("model_loading_timeout")))

    async def _serve_model(self, service: InferenceService, plan: StartPlan) -> Outcome:
        admission = service.admission
        policy = _failure_policy(self._settings)
        admission.model_name = plan.model.name
        admission.hides_failure = policy.hides_failure
        service.model_url = plan.model.reference
        service.profile = plan.profile
        service.sessions = sessions_of(self._settings)
        _log_plan(plan)
        start = ModelStart(service, self._settings, self._environ, plan, self._engine_kind)
        self._supervisor = Supervisor(service, start, policy, partial(self._announce, admission))
        return await self._supervisor.run()

    def _announce(self, admission: Admission) -> None:
        print(f"Ready on {self._url} after {admission.elapsed_seconds:.1f} s", flush=True)
        print(_curl_line(self._url), flush=True)

    async def _drain(self, admission: Admission, stop: asyncio.Event) -> None:
        """Refuse new work, let running work end within the deadline; a second signal hurries."""
        admission.become(State.DRAINING)
        seconds = float(str(self._settings.server_value("shutdown_timeout")))
        logger.info("draining: %d in flight, %g s at most", admission.in_flight, seconds)
        again = asyncio.create_task(stop.wait())
        idle = asyncio.create_task(admission.wait_idle(seconds))
        await asyncio.wait({again, idle}, return_when=asyncio.FIRST_COMPLETED)
        if admission.in_flight:
            logger.warning("ending %d requests that did not finish", admission.in_flight)
            admission.end_all()
            await admission.wait_idle(LAST_WORD_SECONDS)

    async def _close_engine(self, stop: asyncio.Event) -> None:
        if self._supervisor is None:
            return
        close = asyncio.create_task(self._supervisor.close())
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


def _web_options(settings: Settings, environ: Mapping[str, str]) -> WebOptions:
    cors = {
        f"Access-Control-Allow-{header}": str(value)
        for header, key in (
            ("Origin", "cors_allowed_origin"),
            ("Methods", "cors_allowed_methods"),
            ("Headers", "cors_allowed_headers"),
        )
        if (value := settings.server_value(key))
    }
    return WebOptions(
        max_request_size=int(str(settings.server_value("max_request_size"))),
        request_id_header=str(settings.server_value("request_id_header_key") or "x-request-id"),
        api_keys=_api_keys(environ),
        statuses=_statuses(settings),
        cors_headers=MappingProxyType(cors),
    )


def _statuses(settings: Settings) -> Mapping[Fault, int]:
    """Return the configured error codes by fault (http-api.md 12)."""
    keys = {
        Fault.BAD_PARAMETER: "bad_request_http_code",
        Fault.OVERLOAD: "throttle_error_http_code",
        Fault.NOT_READY: "wlm_error_http_code",
        Fault.ENGINE: "server_error_http_code",
        Fault.DEADLINE: "server_error_http_code",
    }
    return MappingProxyType(
        {fault: int(str(settings.server_value(key))) for fault, key in keys.items()}
    )


def _api_keys(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys that open the server; none means it is open.

    Raises:
        StartupError: the key file cannot be read, or holds no key: never an open server instead.
    """
    keys = [environ["LMI_API_KEY"]] if environ.get("LMI_API_KEY") else []
    if path := environ.get("LMI_API_KEY_FILE"):
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise StartupError(f"LMI_API_KEY_FILE {path}: {error.strerror}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise StartupError(f"LMI_API_KEY_FILE {path}: the file holds no key")
        keys += found
    return tuple(keys)


async def _heartbeat(admission: Admission, limit_seconds: float) -> None:
    """Say every few seconds where a long start is, and which limits to raise when it gets late."""
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        if admission.state is not State.PENDING:
            continue
        _, body = admission.ping()
        logger.info("starting: %s", json.dumps(body))
        if 0 < limit_seconds / 2 < admission.engine_seconds:
            logger.warning(
                "half of model_loading_timeout (%g s) has passed; raise it, and on SageMaker the "
                "endpoint's container_startup_health_check_timeout with it",
                limit_seconds,
            )


def _log_plan(plan: StartPlan) -> None:
    origins = plan.arguments.origins
    lines = [
        f"  {name} = {json.dumps(value, default=str)}  ({origins.get(name, 'default')})"
        for name, value in plan.shown_arguments.items()
    ]
    logger.info(
        "model %s from %s; engine arguments:\n%s",
        plan.model.name,
        mask_urls(plan.model.reference),
        "\n".join(lines),
    )


def _curl_line(url: str) -> str:
    body = '{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 30}}'
    reachable = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//127.0.0.1:")
    return f"Try: curl -s {reachable}/invocations -H 'Content-Type: application/json' -d '{body}'"
