"""Who is told of requests, and who traces them; one for the life of a server."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from lmi_vllm.messages import EngineArguments
from lmi_vllm.telemetry.observers import RequestCounter, log_request
from lmi_vllm.telemetry.records import Observer, RequestRecord, Span

OnReady = Callable[[Mapping[str, float]], None]  # seconds by phase
StartSpan = Callable[[RequestRecord, Mapping[str, str]], Span]


def _always() -> list[Observer]:
    return [RequestCounter(), log_request]


@dataclass(slots=True)
class Telemetry:
    """Metrics and the log line for each request always; the rest as configured.

    `start_span` gets a record and the request's headers; None while traces are off.
    """

    observers: list[Observer] = field(default_factory=_always)
    # Told of each engine that is to be started, or joined by a further process.
    on_plan: list[Callable[[EngineArguments], None]] = field(default_factory=list)
    on_ready: list[OnReady] = field(default_factory=list)  # told of each start of a model
    # Awaited when the last request has been answered, while the engine still is there.
    on_drained: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    on_line: list[Callable[[str], None]] = field(default_factory=list)  # of SageMaker's telemetry
    # In a further process of the server: hands such a line to the first one.
    send_line: Callable[[str], None] | None = None
    on_level: list[Callable[[int], None]] = field(default_factory=list)  # told of log levels
    start_span: StartSpan | None = None
