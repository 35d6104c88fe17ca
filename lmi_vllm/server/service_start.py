"""What lives as long as a server: its service as the settings have it, and `ServerContext`.

The service is the queue, the error rates, deferred answers and sticky sessions.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmi_vllm.checks.trusted_folders import beside, distrust_of_folder, trusted_folder
from lmi_vllm.clock import Clock
from lmi_vllm.config.parsers import error_rate
from lmi_vllm.config.secrets import mask_urls
from lmi_vllm.config.settings import Setting, Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.errors import Fault, LmiError, StartupError, StatusTable
from lmi_vllm.inference.deferred import DEFAULT_CAPACITY, DeferredResults
from lmi_vllm.inference.error_rates import ErrorKind, ErrorRate, ErrorRates
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.inference.sessions import DEFAULT_ROOT, Sessions
from lmi_vllm.server.process_group import ProcessGroup
from lmi_vllm.sources.table import upload_directory

logger = logging.getLogger(__name__)

COPY_SECONDS: Final = 8.0
_SESSIONS: Final = "the directory of sessions"


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The parts that live as long as the server, whatever model it has.

    `environ` are the variables as the server got them; `exports` is where libraries, and the
    processes they start, read theirs: os.environ, but for tests.
    """

    service: InferenceService
    environ: Mapping[str, str]
    exports: MutableMapping[str, str]
    engine_factory: EngineFactory
    processes: ProcessGroup
    clock: Clock


def new_service(settings: Settings, clock: Clock) -> InferenceService:
    """Return the service of a server that has not begun to start its model."""
    lifecycle = Lifecycle(error_rates=ErrorRates(_error_rates(settings)), now=clock.now)
    limit = settings.server.job_queue_size
    queue = RequestQueue(lifecycle, limit, clock=clock)
    return InferenceService(
        queue, deferred=_deferred_results(settings), statuses=error_statuses(settings)
    )


def error_statuses(settings: Settings) -> StatusTable:
    """Return the status of every error, with the configured codes."""
    server = settings.server
    return StatusTable(
        {
            Fault.BAD_PARAMETER: server.bad_request_http_code,
            Fault.OVERLOAD: server.throttle_error_http_code,
            Fault.NOT_READY: server.wlm_error_http_code,
            Fault.ENGINE: server.server_error_http_code,
            Fault.DEADLINE: server.server_error_http_code,
        }
    )


def _deferred_results(settings: Settings) -> DeferredResults:
    capacity = settings.server.memory_cache_capacity
    batch = settings.server.cache_batch
    return DeferredResults(DEFAULT_CAPACITY if capacity is None else capacity, batch)


def _error_rates(settings: Settings) -> Mapping[ErrorKind, ErrorRate]:
    texts = {
        ErrorKind.WORKLOAD: settings.server.error_rate_wlm,
        ErrorKind.SERVER: settings.server.error_rate_server,
        ErrorKind.ANY: settings.server.error_rate_any,
    }
    return {kind: ErrorRate(*error_rate(text)) for kind, text in texts.items() if text}


def sessions_of(settings: Settings) -> Sessions:
    """Return the sessions of these settings; where they are enabled their directory is made.

    Raises:
        StartupError: the directory that is asked for cannot be made or written, or there is none
            that others cannot change.
    """
    is_enabled = settings.model.enable_stateful_sessions
    setting = settings.model.detail("sessions_path")
    root = Path(str(settings.model.sessions_path or DEFAULT_ROOT)).absolute()
    if setting is None or not setting.is_set:
        # /dev/shm is not everywhere, nor everybody's.
        if not os.access(root.parent, os.W_OK):
            root = Path(tempfile.gettempdir()) / DEFAULT_ROOT.name
        if is_enabled:
            root = trusted_folder(root, beside(root), _SESSIONS, "option.sessions_path")
    elif is_enabled:
        _check(root, setting)
    seconds = settings.model.sessions_expiration
    return Sessions(root, seconds, is_enabled=is_enabled)


async def copy_sessions(settings: Settings, sessions: Sessions, environ: Mapping[str, str]) -> None:
    """Copy the directory to `sessions_s3url`, where set; a failure is only logged."""
    url = settings.model.sessions_s3url
    if not url or not sessions.root.is_dir():
        return
    shown = mask_urls(str(url))
    upload = asyncio.to_thread(upload_directory, sessions.root, str(url), environ)
    try:
        count = await asyncio.wait_for(upload, COPY_SECONDS)
    except TimeoutError:
        logger.error("sessions are NOT all at %s: %g s were not enough", shown, COPY_SECONDS)
    except (LmiError, OSError) as error:
        logger.error("sessions could NOT be copied to %s: %s", shown, error)
    else:
        logger.info("copied %d session files to %s", count, shown)


def _check(root: Path, setting: Setting) -> None:
    origin = setting.origin
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"sessions_path ({origin}): {root}: {error.strerror}") from error
    if not os.access(root, os.W_OK):
        raise StartupError(f"sessions_path ({origin}): {root} cannot be written")
    if reason := distrust_of_folder(root, _SESSIONS):
        logger.warning("sessions_path (%s): %s", origin, reason)
