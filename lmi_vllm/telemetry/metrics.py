"""Our own Prometheus metrics, but for those of features; vLLM's are in the same registry.

Labels are bounded: routes are patterns, and statuses are those we send. Clients choose adapters'
names, so only the first `MAX_ADAPTERS` have their own label.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, Protocol

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from lmi_vllm._version import __version__
from lmi_vllm.telemetry.metric_files import take_room

MAX_ADAPTERS: Final = 50

disable_created_metrics()  # type: ignore[no-untyped-call] # a second series for every counter, of no use
take_room()

LATENCIES: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_LATENCIES: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)

# With several processes the last value counts: the first process sets them all.
gauge = partial(Gauge, multiprocess_mode="mostrecent")

REQUESTS: Final = Counter(
    "lmi_requests",
    "Requests that have ended, of every route; status 499 is a client that disconnected. Of "
    f"adapters, the first {MAX_ADAPTERS} have a label of their own.",
    ("route", "dialect", "adapter", "status"),
)
REQUEST_SECONDS: Final = Histogram(
    "lmi_request_duration_seconds",
    "From the headers of an inference request to the last byte of its answer.",
    ("dialect",),
    buckets=LATENCIES,
)
FIRST_TOKEN_SECONDS: Final = Histogram(
    "lmi_time_to_first_token_seconds",
    "From the headers of a request to its first generated token, streamed or not.",
    ("dialect",),
    buckets=LATENCIES,
)
TOKEN_SECONDS: Final = Histogram(
    "lmi_time_per_output_token_seconds",
    "Mean time of a request's tokens after the first; one observation for each request.",
    ("dialect",),
    buckets=_TOKEN_LATENCIES,
)
QUEUE_SECONDS: Final = Histogram(
    "lmi_queue_time_seconds",
    "Time a request waited in the engine's queue before it was first scheduled.",
    ("dialect",),
    buckets=(0.0005, 0.001, 0.005, *LATENCIES[1:]),
)
PROMPT_TOKENS: Final = Counter(
    "lmi_prompt_tokens",
    "Tokens of prompts given to the engine (each step of a beam search gives it one).",
    ("adapter",),
)
GENERATED_TOKENS: Final = Counter(
    "lmi_generated_tokens",
    "Tokens the engine generated, also for clients that disconnected.",
    ("adapter",),
)
STREAM_ERRORS: Final = Counter(
    "lmi_stream_errors",
    "Streams that ended with an error row after status 200, by fault.",
    ("fault",),
)
DISCONNECTS: Final = Counter(
    "lmi_client_disconnects",
    "Clients that disconnected before the end of their answer; their generation was aborted.",
    ("dialect",),
)
DROPPED_LINES: Final = Counter(
    "lmi_log_lines_dropped",
    "Lines of the log that were dropped because what reads stderr had stopped, those of the "
    "engine's processes among them.",
)
NOT_FINITE: Final = Counter(
    "lmi_not_finite_requests",
    "Requests that ended with an error because their numbers were not finite (NaN). `of` says "
    "whether an `adapter` or the `model` computed them.",
    ("of",),
)
DRAINS: Final = Counter("lmi_drains", "Shutdowns that let running requests end.")
DRAINED: Final = Counter(
    "lmi_drained_requests",
    "Requests in flight when a drain began: completed within its deadline, or cut off at it.",
    ("outcome",),
)
ENGINE_RESTARTS: Final = Counter("lmi_engine_restarts", "Engines started after one had died.")
WAKE_SECONDS: Final = Histogram(
    "lmi_wake_seconds",
    "From the request that wakes a model to the model's own first token; its count is that of "
    "wake-ups.",
    buckets=LATENCIES,
)

# Set when the metrics are read.
TASKS: Final = gauge("lmi_asyncio_tasks", "Tasks of the event loop that have not ended.")
ASLEEP_SECONDS: Final = gauge(
    "lmi_asleep_seconds", "Seconds since the idle model fell asleep; 0 while it does not sleep so."
)
IN_FLIGHT: Final = gauge(
    "lmi_requests_in_flight",
    "Queue slots that admitted requests hold, running and waiting.",
)
QUEUE_LIMIT: Final = gauge(
    "lmi_queue_limit", "Queue slots (job_queue_size); requests beyond them are refused."
)
STATE: Final = gauge(
    "lmi_state",
    "1 for the state /ping shows, 0 for the others; Unhealthy also after too many errors.",
    ("state",),
)
ADAPTERS_REGISTERED: Final = gauge("lmi_adapters_registered", "Adapters that requests may name.")
ADAPTERS_LOADED: Final = gauge("lmi_adapters_loaded", "Adapters whose weights the engine has.")
STARTUP_SECONDS: Final = gauge(
    "lmi_startup_phase_seconds",
    "Seconds that each phase of the last start, or restart of the engine, has taken. Importing "
    "vLLM counts for the phase `engine` once the files are there.",
    ("phase",),
)
STARTUP_STEP_SECONDS: Final = gauge(
    "lmi_startup_step_seconds",
    "Seconds of each step of the phase `engine`, as far as vLLM's log reports them.",
    ("step",),
)
DOWNLOAD_BYTES: Final = gauge("lmi_download_bytes", "Bytes of the model that have arrived.")
DOWNLOAD_BYTES_EXPECTED: Final = gauge(
    "lmi_download_bytes_expected", "Bytes of the model to fetch; 0 without a download."
)
DOWNLOAD_FILES: Final = gauge("lmi_download_files", "Files of the model that are complete.")
DOWNLOAD_FILES_EXPECTED: Final = gauge(
    "lmi_download_files_expected", "Files of the model to fetch; 0 without a download."
)
BUILD: Final = gauge("lmi_build_info", "1; the label says what is running.", ("version",))
BUILD.labels(__version__).set(1)
for _of in ("adapter", "model"):  # a rate needs a count before the first one
    NOT_FINITE.labels(_of)

ALL: Final = tuple(one for one in vars().copy().values() if isinstance(one, MetricWrapperBase))


class Collectable(Protocol):
    """An object with series."""

    def collect(self) -> Iterable[Metric]:
        """Return the series."""
        ...


def own_series(names: Sequence[str] = ()) -> Collectable:
    """Return the collector of this process's series of these names, or of all."""
    return REGISTRY.restricted_registry(names) if names else REGISTRY
