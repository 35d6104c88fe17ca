"""Observers of finished requests and of the server's lifecycle; those of every server."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lmi_vllm.telemetry.metrics import (
    DISCONNECTS,
    FIRST_TOKEN_SECONDS,
    GENERATED_TOKENS,
    MAX_ADAPTERS,
    PROMPT_TOKENS,
    QUEUE_SECONDS,
    REQUEST_SECONDS,
    REQUESTS,
    TOKEN_SECONDS,
    Collectable,
    own_series,
)
from lmi_vllm.telemetry.records import SEVERAL, Observer, RequestRecord, RequestSummary, Span

logger = logging.getLogger(__name__)

StartSpan = Callable[[RequestRecord, Mapping[str, str]], Span]
request_logger = logging.getLogger("lmi_vllm.requests")

BASE: Final = "base"
OTHER: Final = "other"
_OWN_LABELS: Final = frozenset({BASE, OTHER, SEVERAL})
_MILLISECONDS: Final = 1000
# Asked every few seconds, by an open page, probes and scrapes: successes are logged below info.
_POLLED: Final = frozenset(
    {
        "/console/state", "/health", "/live", "/metrics", "/ping", "/ready",
        "/v2/health/live", "/v2/health/ready",
    }
)  # fmt: skip
_FIRST_ERROR: Final = 400
_NOT_READY: Final = 503


class _Series(dict[Any, Any]):
    """A metric's series by their labels: looking one up in the metric costs more than adding."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: str | tuple[str, ...]) -> Any:
        """Make the series, which is in `/metrics` from then on."""
        values = (labels,) if isinstance(labels, str) else labels
        series = self[labels] = self._metric.labels(*values)
        return series


class RequestCounter:
    """Counts requests that have ended; one for each server."""

    def __init__(self) -> None:
        self._adapters: set[str] = set()
        self._requests, self._seconds = _Series(REQUESTS), _Series(REQUEST_SECONDS)
        self._first_token, self._token = _Series(FIRST_TOKEN_SECONDS), _Series(TOKEN_SECONDS)
        self._queue = _Series(QUEUE_SECONDS)
        self._prompt, self._generated = _Series(PROMPT_TOKENS), _Series(GENERATED_TOKENS)

    def __call__(self, summary: RequestSummary) -> None:
        """Count one request."""
        dialect, adapter = summary.dialect, self._adapter_label(summary.adapter)
        if not summary.is_background:
            self._requests[summary.route, dialect, adapter, str(summary.status)].inc()
            if summary.is_disconnected:
                DISCONNECTS.labels(dialect).inc()
        if not summary.is_inference:
            return
        self._seconds[dialect].observe(summary.seconds)
        for histogram, seconds in (
            (self._first_token, summary.first_token_seconds),
            (self._token, summary.token_seconds),
            (self._queue, summary.queue_seconds),
        ):
            if seconds is not None:
                histogram[dialect].observe(seconds)
        for counter, tokens in (
            (self._prompt, summary.prompt_tokens),
            (self._generated, summary.generated_tokens),
        ):
            series = counter[adapter]  # exists in any case
            if tokens:
                series.inc(tokens)

    def _adapter_label(self, name: str) -> str:
        """Return the name while there is room for another; a counter never drops one."""
        if name in ("", SEVERAL):
            return name or BASE
        if name in _OWN_LABELS:  # an adapter's name
            name = f"{name}_"
        if name in self._adapters:
            return name
        if len(self._adapters) >= MAX_ADAPTERS:
            return OTHER
        self._adapters.add(name)
        return name


@dataclass(slots=True)
class RequestTotals:
    """Counts the requests of inference that have ended, for the server's last line."""

    answered: int = 0
    failed: int = 0  # refused ones, too
    left: int = 0  # by their client

    def __call__(self, summary: RequestSummary) -> None:
        """Count one request."""
        if not summary.is_inference or summary.is_background:
            return
        if summary.is_disconnected:
            self.left += 1
        elif summary.fault is not None or summary.status >= _FIRST_ERROR:
            self.failed += 1
        else:
            self.answered += 1

    def take(self) -> tuple[int, int, int]:
        """Return the counts in the order of the fields, and begin again with zeros."""
        taken = self.answered, self.failed, self.left
        self.answered = self.failed = self.left = 0
        return taken

    def add(self, answered: int, failed: int, left: int) -> None:
        """Add those of other processes."""
        self.answered += answered
        self.failed += failed
        self.left += left

    def in_words(self, cut: int) -> str:
        """Return what is not zero, `cut` being those that the end cut off; empty for nothing."""
        noun = "request" if self.answered == 1 else "requests"
        parts = (
            (self.answered, f"{noun} answered"),
            (self.failed, "refused or failed"),
            (self.left, "left by their clients"),
            (cut, "of those in flight cut off"),
        )
        return ", ".join(f"{number} {words}" for number, words in parts if number)


@dataclass(slots=True)
class RequestLog:
    """Logs a line for each request; those of `quiet_paths`, or all, are below info.

    Of probes that find the server not ready the first has a line: a start may take many minutes.
    """

    quiet_paths: frozenset[str] = frozenset()
    is_quiet: bool = False
    _not_ready: set[str] = field(default_factory=set)  # routes whose last answer was 503

    def __call__(self, summary: RequestSummary) -> None:
        """Log LMI's access line of a request, then the request's id and figures."""
        level = logging.DEBUG if self._is_quiet(summary) else logging.INFO
        if request_logger.isEnabledFor(level):
            _log(summary, level)

    def _is_quiet(self, summary: RequestSummary) -> bool:
        if summary.route in _POLLED and self._is_usual(summary):
            return True
        return self.is_quiet or (
            bool(self.quiet_paths) and summary.shown_path.partition("?")[0] in self.quiet_paths
        )

    def _is_usual(self, summary: RequestSummary) -> bool:
        if summary.status != _NOT_READY:
            self._not_ready.discard(summary.route)
            return summary.status < _FIRST_ERROR
        is_repeated = summary.route in self._not_ready
        self._not_ready.add(summary.route)
        return is_repeated


def _log(summary: RequestSummary, level: int) -> None:
    figures = _figures(summary)
    fields = _fields(summary) | figures
    shown = "".join([f" {name}={value}" for name, value in figures.items()])
    text = (
        f'{summary.remote} "{summary.method} {summary.shown_path} HTTP/1.1" {summary.status} '
        f"{fields['milliseconds']} RequestId=[{summary.request_id}]{shown}"
    )
    # As `request_logger.log` does, which would look for the place in the code first.
    record = request_logger.makeRecord(
        request_logger.name, level, __file__, 0, text, (), None, "log_request", {"fields": fields}
    )
    request_logger.handle(record)


def _fields(summary: RequestSummary) -> dict[str, object]:
    return {
        "request_id": summary.request_id,
        "remote": summary.remote,
        "method": summary.method,
        "path": summary.shown_path,
        "route": summary.route,
        "dialect": summary.dialect,
        "status": summary.status,
        "milliseconds": round(summary.seconds * _MILLISECONDS),
    }


def _figures(summary: RequestSummary) -> dict[str, object]:
    """Return the figures that only some requests have."""
    found: dict[str, object] = {}
    if summary.adapter:
        found["adapter"] = summary.adapter
    if summary.prompt_tokens or summary.generated_tokens:
        found["prompt_tokens"] = summary.prompt_tokens
        found["generated_tokens"] = summary.generated_tokens
    for name, seconds in (
        ("first_token_milliseconds", summary.first_token_seconds),
        ("token_milliseconds", summary.token_seconds),
        ("queue_milliseconds", summary.queue_seconds),
    ):
        if seconds is not None:
            found[name] = round(seconds * _MILLISECONDS, 1)
    if summary.fault is not None:
        found["fault"] = str(summary.fault)
    if summary.is_background:
        found["deferred"] = True
    if summary.is_disconnected:
        found["disconnected"] = True
    return found


@dataclass(slots=True)
class Telemetry:
    """Metrics and a log line for each request; other observers as configured.

    `start_span` gets a record and the request's headers; None while traces are off.
    """

    request_log: RequestLog = field(default_factory=RequestLog)
    totals: RequestTotals = field(default_factory=RequestTotals)
    observers: list[Observer] = field(default_factory=lambda: [RequestCounter()])
    on_line: list[Callable[[str], None]] = field(default_factory=list)  # of SageMaker's telemetry
    # In a further process of the server: sends such a line to the first one.
    send_line: Callable[[str], None] | None = None
    on_level: list[Callable[[int], None]] = field(default_factory=list)  # told of log levels
    start_span: StartSpan | None = None
    # The series of these names, or all, for /metrics.
    series: Callable[[Sequence[str]], Collectable] = own_series

    def __post_init__(self) -> None:
        self.observers += [self.totals, self.request_log]
