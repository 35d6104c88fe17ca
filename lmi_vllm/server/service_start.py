"""What lives as long as a server: its service as the settings have it, and `ServerContext`."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from lmi_vllm.clock import Clock
from lmi_vllm.config.settings import Settings
from lmi_vllm.engine.factory import EngineFactory
from lmi_vllm.errors import Fault, StatusTable
from lmi_vllm.inference.lifecycle import Lifecycle
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.server.beside import ServerEvents
from lmi_vllm.server.process_group import ProcessGroup


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
    events: ServerEvents = field(default_factory=ServerEvents)


def new_service(settings: Settings, clock: Clock) -> InferenceService:
    """Return the service of a server that has not begun to start its model."""
    lifecycle = Lifecycle(now=clock.now)
    limit = settings.server.job_queue_size
    queue = RequestQueue(lifecycle, limit, clock=clock)
    return InferenceService(queue, statuses=error_statuses(settings))


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
