"""Streams of a reply: direct writes, limits of pauses, and the last row of a failed stream."""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from lmi_vllm.errors import DeadlineError, Dialect, LmiError, StatusTable
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.response.formatters import StreamFormatter
from lmi_vllm.messages import GenerationChunk, ServingProfile
from lmi_vllm.telemetry.metrics import STREAM_ERRORS
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)

Item = TypeVar("Item")


class RowSink(Protocol):
    """Takes a stream's rows as they come, once connected."""

    @property
    def is_paused(self) -> bool:
        """Whether the client has to read before more is written."""
        ...

    @property
    def written_at(self) -> float:
        """When rows were last written, by the event loop's clock."""
        ...

    def put(self, row: bytes) -> None:
        """Write a row; if the client has disconnected, drop it."""
        ...


class ReplyStream(AsyncIterator[bytes]):
    """A byte stream that releases its request's resources when closed, started or not.

    A generator that was never started runs none of its `finally` blocks. A client that disconnects
    between the status line and the first byte would keep its slot in the queue for ever. With
    `connect`, some rows are written to a sink while the next one is awaited.
    """

    def __init__(
        self,
        rows: AsyncIterator[bytes],
        release: Callable[[], Awaitable[None]],
        connect: Callable[[RowSink], None] | None = None,
    ) -> None:
        self._rows = rows
        self._release = release
        self._connect = connect

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._rows)

    def connect(self, sink: RowSink) -> None:
        """Let the stream write rows to `sink` itself, if it can."""
        if self._connect is not None:
            self._connect(sink)

    async def aclose(self) -> None:
        """Abort what runs in the engine and release everything; may be called twice."""
        try:
            await close_iterator(self._rows)
        finally:
            await self._release()


async def close_iterator(iterator: AsyncIterator[Item]) -> None:
    """Close an async generator; iterators without `aclose` need none."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()


class SilenceLimit:
    """Ends the wait for a stream's next item when it takes too long.

    One timer serves the whole stream. At the end of each span it checks whether the same wait still
    runs. A timer for each item would take a tenth of a token's time. `seconds` and `setting` may be
    changed between waits. What is written to `sink` during a wait counts as an item.
    """

    sink: RowSink | None = None

    def __init__(self, seconds: float, setting: str) -> None:
        self.seconds = seconds
        self.setting = setting
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf  # when the running wait has taken too long
        self.is_waiting = False  # a reader, for the next item
        self._task: asyncio.Task[Any] | None = None
        self._is_over = False

    def next(self, items: AsyncIterator[Item]) -> Coroutine[Any, Any, Item | None]:
        """Return the next item, None at the end; see `within`."""
        return self.within(anext(items, None))

    async def within(self, awaitable: Awaitable[Item]) -> Item:
        """Return the result of `awaitable`.

        Raises:
            DeadlineError: nothing came in time; the text names the setting.
        """
        self._task = task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        self._due = self._loop.time() + self.seconds
        self.is_waiting = True
        if self._timer is None or self._timer.when() > self._due:
            self._arm(self._due)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            self._is_over = False
            if task is not None and task.uncancel() > cancels:  # others wait for its end, too
                raise
            raise deadline_error(self.seconds, self.setting) from None
        finally:
            self._due = math.inf
            self.is_waiting = False

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        due = self._due
        if due is math.inf:  # no wait runs: the next one starts it again
            return
        if self.sink is not None:
            due = max(due, self.sink.written_at + self.seconds)
        if self._loop.time() < due:
            self._arm(due)
        elif self._task is not None:
            self._is_over = True
            self._task.cancel()


async def gathered(coroutines: Sequence[Coroutine[Any, Any, Item]]) -> list[Item]:
    """Return all results, in order; the first failure cancels the others and is raised."""
    if len(coroutines) == 1:  # most often: no task is needed
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except* LmiError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


class Deadline(contextlib.AbstractAsyncContextManager[None]):
    """Bounds the time of its body, which raises DeadlineError then; its text names the setting."""

    def __init__(self, seconds: float, setting: str) -> None:
        self._seconds = seconds
        self._setting = setting
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(TimeoutError):
            await self._timeout.__aexit__(kind, error, trace)
            if not isinstance(error, TimeoutError):
                return
        raise deadline_error(self._seconds, self._setting) from None


def deadline_error(seconds: float, setting: str) -> DeadlineError:
    """Return the error for a time limit that expired."""
    return DeadlineError(f"no answer within {seconds:g} s ({setting})")


class _DirectWriter:
    """Writes items while a stream's reader waits for the next row."""

    __slots__ = ("_sink", "limit")

    def __init__(self, limit: SilenceLimit) -> None:
        self.limit = limit
        self._sink: RowSink | None = None

    def connect(self, sink: RowSink) -> None:
        """Write to `sink` from now on."""
        self._sink = self.limit.sink = sink

    @property
    def is_open(self) -> bool:
        """Whether a chunk may be written: it must come after everything that was yielded."""
        sink = self._sink
        return sink is not None and self.limit.is_waiting and not sink.is_paused

    def _write(self, rows: bytes) -> None:
        if self._sink is not None:
            self._sink.put(rows)


class DirectRowWriter(_DirectWriter):
    """Writes chunks as the rows of a stream."""

    __slots__ = ("formatter",)

    def __init__(self, formatter: StreamFormatter, limit: SilenceLimit) -> None:
        super().__init__(limit)
        self.formatter = formatter

    def read_chunk(self, chunk: GenerationChunk) -> None:
        """Write the rows of `chunk`."""
        self._write(self.formatter.rows(chunk))

    def read_token(self, token: int, text: str, logprob: float | None) -> None:
        """Write the row of one ordinary token."""
        if self._sink is not None:  # `_write` inline: this runs for each token
            self._sink.put(self.formatter.token_row(token, text, logprob))

    def read_tokens(self, ids: list[int], texts: list[str], logprobs: list[float] | None) -> None:
        """Write the rows of several ordinary tokens together."""
        values: Sequence[float | None] = logprobs or [None] * len(ids)
        self._write(b"".join(map(self.formatter.token_row, ids, texts, values)))


class DirectEventWriter(_DirectWriter):
    """Writes vLLM's events, each in the framing of its route."""

    __slots__ = ("convert",)

    def __init__(self, limit: SilenceLimit, convert: Callable[[bytes], bytes] = bytes) -> None:
        super().__init__(limit)
        self.convert = convert

    def read_event(self, event: bytes) -> None:
        """Write one event."""
        self._write(self.convert(event))


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Bounds the pauses of a stream and makes the last row of a failed one."""

    queue: RequestQueue
    profile: ServingProfile
    statuses: StatusTable

    async def rows(
        self,
        first: GenerationChunk | None,
        chunks: AsyncIterator[GenerationChunk],
        direct: DirectRowWriter,
    ) -> AsyncIterator[bytes]:
        """Yield the framed rows of a stream; an error after the first byte is its last row."""
        formatter, limit = direct.formatter, direct.limit
        limit.seconds, limit.setting = self._chunk_limit
        chunk = first
        try:
            while chunk is not None:
                yield formatter.rows(chunk)
                if chunk.finish_reason is not None:
                    return
                chunk = await limit.within(anext(chunks, None))
        except (LmiError, asyncio.CancelledError) as raised:
            error = self._failure(raised)
            status = self.statuses.of(error, invocations_dialect(self.profile))
            yield formatter.error(error.text, status)
        finally:
            limit.close()
            await close_iterator(chunks)

    async def events(
        self,
        events: AsyncIterator[bytes],
        last_row: Callable[[LmiError], bytes],
        limit: SilenceLimit,
    ) -> AsyncIterator[bytes]:
        """Yield vLLM's events; an early end has a last row in the route's dialect."""
        try:
            while (event := await limit.within(anext(events, None))) is not None:
                yield event
                limit.seconds, limit.setting = self._chunk_limit
        except (LmiError, asyncio.CancelledError) as raised:
            yield last_row(self._failure(raised))
        finally:
            limit.close()
            await close_iterator(events)

    @property
    def _chunk_limit(self) -> tuple[float, str]:
        profile = self.profile
        if profile.chunked_read_timeout < profile.predict_timeout:
            return profile.chunked_read_timeout, "chunked_read_timeout"
        return profile.predict_timeout, "predict_timeout"

    def _failure(self, raised: BaseException) -> LmiError:
        """Return the error that ended a stream, after counting it; a disconnect is raised again."""
        error = raised if isinstance(raised, LmiError) else self.queue.shutdown_error()
        if error is None:
            raise raised
        logger.warning("a stream ended early: %s", error)
        if (record := current_record()) is not None:
            record.fault = error.fault
            STREAM_ERRORS.labels(str(error.fault)).inc()
        return error


def invocations_dialect(profile: ServingProfile) -> Dialect:
    """Return the dialect of `/invocations` and similar routes."""
    return Dialect.TGI if profile.tgi_compat else Dialect.LMI
