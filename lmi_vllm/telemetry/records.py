"""The record of one request: filled while it runs, reported once when it has ended.

Nothing here costs anything per token. The engine passes its own counters (`EngineSequence`), which
are read when the request ends. A context variable holds the record, because on one lane vLLM's own
handlers are between the route and the engine.
"""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

from lmi_vllm.errors import Dialect, Fault

DISCONNECTED: Final = 499  # as in nginx's log: no client was left to get a status
SUCCESS: Final = 200
FAILURE: Final = 500
SEVERAL: Final = "several"  # adapters of a list that are named


class SequenceFigures(NamedTuple):
    """The engine's figures of one sequence; times in seconds, None for what did not happen."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float | None = None
    first_token_time: float | None = None  # as of time.time()
    token_seconds: float | None = None  # mean, after the first token


class EngineSequence(Protocol):
    """One sequence of a request inside the engine."""

    def figures(self) -> SequenceFigures:
        """Return the present figures."""
        ...


class RequestSummary(NamedTuple):
    """One request that has ended; times in seconds."""

    request_id: str
    method: str
    route: str  # the pattern, never the requested path
    shown_path: str
    remote: str
    status: int
    dialect: Dialect
    adapter: str  # "" is the base model
    seconds: float
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    queue_seconds: float | None = None
    is_inference: bool = False
    is_background: bool = False  # the part of a deferred request after its answer
    fault: Fault | None = None  # of the refusal, or of the early end of a stream

    @property
    def is_disconnected(self) -> bool:
        """Whether the client disconnected before the end."""
        return self.status == DISCONNECTED

    @property
    def failure(self) -> Fault | int | None:
        """What the request counts as: the fault, or the status of an answer that is no success.

        Of a client's fault it is the status: 424 counts as in LMI, and 400 on `/v1` as nothing.
        """
        is_refusal = self.fault is Fault.CLIENT and self.status != SUCCESS
        if (self.fault is not None and not is_refusal) or self.is_disconnected:
            return self.fault
        return None if self.status == SUCCESS else self.status


Observer = Callable[[RequestSummary], None]


class Span(Protocol):
    """The trace of one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that carry the trace (W3C trace context)."""
        ...

    def end(self, summary: RequestSummary) -> None:
        """End the span with the outcome of the request."""
        ...


@dataclass(slots=True)
class RequestRecord:
    """One request while it runs."""

    request_id: str
    method: str
    route: str
    shown_path: str
    remote: str
    dialect: Dialect
    observers: Sequence[Observer] = ()
    adapter: str = ""
    is_inference: bool = False
    is_background: bool = False
    fault: Fault | None = None
    span: Span | None = None
    key: int | None = None  # which of the server's keys it had
    trace_headers: Mapping[str, str] | None = None  # the trace that the engine's span continues
    decoded_pixels: int = 0  # of its images
    decoded_audio: int = 0  # bytes
    prompt_logprobs: int = 0  # of all its prompts
    retry_after_seconds: int | None = None  # if it was refused for what may be free in a moment
    parser_seconds: float = 0.0  # that vLLM's parsers took for its answer
    # Called with a task that continues after the answer: the request's resources are kept until it
    # ends.
    keep: Callable[[asyncio.Task[Any]], None] | None = None
    sequences: list[EngineSequence] = field(default_factory=list)
    at_end: list[Callable[[], object]] = field(default_factory=list)  # frees what it holds
    began: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)

    @property
    def source(self) -> str:
        """The client: the index of its API key, else its address; of IPv6, its /64."""
        if self.key is not None:
            return f"key {self.key}"
        try:
            address = ipaddress.IPv6Address(self.remote)
        except ValueError:
            return self.remote
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))

    def use_adapter(self, name: str | None) -> None:
        """Record the adapter that answers; a list of inputs may name several."""
        if name:
            self.adapter = name if self.adapter in ("", name) else SEVERAL

    def background(self) -> "RequestRecord":
        """Return a record for a task that continues after the answer; it takes what has begun."""
        sequences, self.sequences = self.sequences, []
        at_end, self.at_end = self.at_end, []
        return replace(
            self,
            is_background=True,
            fault=None,
            span=None,
            keep=None,
            sequences=sequences,
            at_end=at_end,
            began=time.monotonic(),
            arrived=time.time(),
        )

    def end(self, status: int | None) -> None:
        """Notify every observer; `status` is the answer's, None where no client could get it."""
        summary = self.summary(status)
        self.sequences.clear()  # the context of an idle connection keeps the record
        self.keep = None
        for free in self.at_end:
            free()
        self.at_end.clear()
        for observe in self.observers:
            observe(summary)
        if self.span is not None:
            self.span.end(summary)

    def end_with(self, task: asyncio.Task[Any]) -> None:
        """Notify every observer of what went on after the answer, and has ended."""
        if task.cancelled():
            self.end(None)
        else:
            self.end(SUCCESS if task.exception() is None else FAILURE)

    def summary(self, status: int | None) -> RequestSummary:
        """Return the finished request: here it is decided what it counts as."""
        figures = _together([sequence.figures() for sequence in self.sequences])
        first = figures.first_token_time
        return RequestSummary(
            self.request_id,
            self.method,
            self.route,
            self.shown_path,
            self.remote,
            DISCONNECTED if status is None else status,
            self.dialect,
            self.adapter,
            time.monotonic() - self.began,
            figures.prompt_tokens,
            figures.generated_tokens,
            None if first is None else max(0.0, first - self.arrived),
            figures.token_seconds,
            figures.queue_seconds,
            self.is_inference,
            self.is_background,
            self.fault,
        )


def _together(figures: Sequence[SequenceFigures]) -> SequenceFigures:
    """Return the figures of a request: sums of tokens, the mean of tokens' times, the extremes."""
    if len(figures) == 1:  # most requests
        return figures[0]
    first = [one.first_token_time for one in figures if one.first_token_time is not None]
    spent = [one.token_seconds for one in figures if one.token_seconds is not None]
    queued = [one.queue_seconds for one in figures if one.queue_seconds is not None]
    return SequenceFigures(
        sum(one.prompt_tokens for one in figures),
        sum(one.generated_tokens for one in figures),
        max(queued, default=None),
        min(first, default=None),
        sum(spent) / len(spent) if spent else None,
    )


_CURRENT: Final[ContextVar[RequestRecord | None]] = ContextVar("lmi_vllm_request", default=None)


def current_record() -> RequestRecord | None:
    """Return the record of the current request; None outside of one."""
    return _CURRENT.get()


def enter_record(record: RequestRecord | None) -> None:
    """Make `record` the current one of this task and of the tasks that it starts."""
    _CURRENT.set(record)
