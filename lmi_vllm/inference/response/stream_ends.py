"""Streams to their ends: rows until the last, or what the route's dialect says of a failure."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from lmi_vllm.errors import LmiError, RouteFamily, status_of
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.response.formatters import StreamFormatter
from lmi_vllm.inference.response.openai_replies import OpenAIDialect, StreamDialect
from lmi_vllm.inference.response.streams import RowSink, SilenceLimit, close_iterator
from lmi_vllm.messages import GenerationChunk, ServingProfile
from lmi_vllm.telemetry.metrics import STREAM_ERRORS
from lmi_vllm.telemetry.records import current_record

logger = logging.getLogger(__name__)


class _Direct:
    """Writes what comes while a stream's reader waits for the next row."""

    __slots__ = ("_sink", "limit")

    def __init__(self, limit: SilenceLimit) -> None:
        self.limit = limit
        self._sink: RowSink | None = None

    def connect(self, sink: RowSink) -> None:
        """Write to `sink` from here on."""
        self._sink = sink

    @property
    def is_open(self) -> bool:
        """Whether a chunk may be written: it has to come after all that was yielded."""
        sink = self._sink
        return sink is not None and self.limit.is_waiting and sink.is_ready

    def _write(self, rows: bytes) -> None:
        if self._sink is not None:
            self._sink.put(rows)
            self.limit.extend()


class DirectRows(_Direct):
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
        if self._sink is not None:  # `_write`, without the call: this is done for each token
            self._sink.put(self.formatter.token_row(token, text, logprob))
            self.limit.extend()


class DirectEvents(_Direct):
    """Writes vLLM's events in the route's dialect."""

    __slots__ = ("_dialect",)

    def __init__(self, dialect: OpenAIDialect, limit: SilenceLimit) -> None:
        super().__init__(limit)
        self._dialect = dialect

    def read_event(self, event: bytes) -> None:
        """Write one event."""
        self._write(self._dialect.event(event))


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Bounds the silences of a stream and gives its failure the last word."""

    queue: RequestQueue
    profile: ServingProfile

    async def rows(
        self,
        first: GenerationChunk | None,
        chunks: AsyncIterator[GenerationChunk],
        direct: DirectRows,
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
                chunk = await limit.next(chunks)
        except (LmiError, asyncio.CancelledError) as raised:
            error = self._last_word(raised)
            yield formatter.error(error.text, status_of(error, lmi_family(self.profile)))
        finally:
            limit.close()
            await close_iterator(chunks)

    async def events(
        self, events: AsyncIterator[bytes], dialect: StreamDialect, limit: SilenceLimit
    ) -> AsyncIterator[bytes]:
        """Yield vLLM's events; what ends them early is said in the route's own words."""
        try:
            while (event := await limit.next(events)) is not None:
                yield event
                limit.seconds, limit.setting = self._chunk_limit
        except (LmiError, asyncio.CancelledError) as raised:
            yield dialect.error(self._last_word(raised))
        finally:
            limit.close()
            await close_iterator(events)

    @property
    def _chunk_limit(self) -> tuple[float, str]:
        profile = self.profile
        if profile.chunked_read_timeout < profile.predict_timeout:
            return profile.chunked_read_timeout, "chunked_read_timeout"
        return profile.predict_timeout, "predict_timeout"

    def _last_word(self, raised: BaseException) -> LmiError:
        """Return what a stream says at its end; a client's own going away is raised again."""
        error = raised if isinstance(raised, LmiError) else self.queue.shutdown_error()
        if error is None:
            raise raised
        logger.warning("a stream ended early: %s", error)
        if (record := current_record()) is not None:
            record.fault = error.fault
            STREAM_ERRORS.labels(str(error.fault)).inc()
        self.queue.lifecycle.error_rates.record(error)
        return error


def lmi_family(profile: ServingProfile) -> RouteFamily:
    """Return whose words an error has on the routes of LMI."""
    return RouteFamily.TGI if profile.tgi_compat else RouteFamily.LMI
