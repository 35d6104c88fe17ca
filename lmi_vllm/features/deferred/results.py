"""Deferred results: a client starts a request now and polls for its result.

A request with `x-synchronous: false` runs in the background, and its pieces are kept here. The
client reads them with the token of the first answer, followed by a position.
"""

import asyncio
import contextlib
import logging
import re
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from lmi_vllm.config.settings import Settings
from lmi_vllm.errors import (
    DEFAULT_STATUSES,
    BadParameterError,
    Dialect,
    Fault,
    LmiError,
    StatusTable,
)
from lmi_vllm.features.deferred.settings import DeferredSettings
from lmi_vllm.inference.context import Answer
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.response.streams import close_iterator
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.messages import InferenceCall, Reply
from lmi_vllm.server.context import ServerEvents
from lmi_vllm.telemetry.records import current_record, enter_record

logger = logging.getLogger(__name__)

SYNCHRONOUS: Final = "x-synchronous"
STARTING_TOKEN: Final = "x-starting-token"
NEXT_TOKEN: Final = "x-next-token"
MAX_ITEMS: Final = "x-max-items"
DEFAULT_CAPACITY: Final = 1000  # results
MAX_BYTES: Final = 256 << 20  # of all results together

_TOKEN: Final = re.compile(r"([0-9a-f-]{36})(\d{0,9})")
_ACCEPTED: Final = 202


@dataclass(slots=True)
class _Result:
    """The result of one request so far."""

    client: str = ""
    key: int | None = None  # the API key that asked for it: no other one reads it
    task: asyncio.Task[None] | None = None
    head: Reply | None = None  # status, content type and headers, once known
    pieces: list[bytes] = field(default_factory=list)
    failure: str | None = None
    is_done: bool = False
    size: int = 0  # bytes of all pieces


class DeferredResults:
    """Results by token; the client that has the most loses those that it read least recently.

    Pieces become readable in steps of `batch`. A running request that is evicted is cancelled.
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        batch: int = 1,
        max_bytes: int = MAX_BYTES,
        statuses: StatusTable = DEFAULT_STATUSES,
    ) -> None:
        self._capacity = capacity
        self._batch = batch
        self._max_bytes = max_bytes
        self._failed = statuses.of_fault(Fault.ENGINE, Dialect.LMI)  # LMI's for every failure
        self._results: OrderedDict[str, _Result] = OrderedDict()
        self._bytes = 0  # of all of them

    def __len__(self) -> int:
        return len(self._results)

    def start(self, coroutine: Coroutine[Any, Any, Reply]) -> Reply:
        """Run `coroutine` in the background and return the reply with its token."""
        token = str(uuid.uuid4())
        record = current_record()
        result = self._results[token] = _Result()
        if record is not None:
            result.client, result.key = record.source, record.key
        result.task = asyncio.create_task(self._collect(coroutine, token, result))
        self._evict()
        return Reply(200, "text/plain", headers=_next(token))

    def read(self, given: str, properties: Mapping[str, str]) -> Reply:
        """Return the readable pieces from the position in the token `given` on.

        Raises:
            BadParameterError: this client's key has no such token, or `x-max-items` is not a
                positive number.
        """
        match = _TOKEN.fullmatch(given.strip())
        result = self._results.get(match[1]) if match else None
        reader = current_record()
        if match is None or result is None or (reader and reader.key) != result.key:
            raise BadParameterError(f"Invalid {STARTING_TOKEN}: {given}")
        most = _max_items(properties)
        token, start = match[1], int(match[2] or 0)
        self._results.move_to_end(token)
        readable = len(result.pieces)
        if not result.is_done:
            readable -= readable % self._batch
        end = min(readable, start + most) if most else readable
        if result.is_done and result.failure is not None and start >= readable:
            row = {"error": result.failure, "code": self._failed}
            return Reply(self._failed, "application/json", orjson.dumps(row) + b"\n")
        is_over = result.is_done and result.failure is None and end >= readable
        headers = {} if is_over else _next(token, max(start, end))
        if result.head is None or (not readable and not result.is_done):
            return Reply(_ACCEPTED, "text/plain", headers=headers)
        body = b"".join(result.pieces[start:end])
        return replace(result.head, body=body, headers={**result.head.headers, **headers})

    async def _collect(
        self, coroutine: Coroutine[Any, Any, Reply], token: str, result: _Result
    ) -> None:
        record = current_record()
        if record is not None:  # the request itself ends with its token
            record = record.background()
            enter_record(record)
        status = None  # of one that is evicted: no client reads it
        try:
            status = await self._read(coroutine, token, result)
        finally:
            if record is not None:
                record.end(status)
            result.is_done = True
            self._evict()

    async def _read(
        self, coroutine: Coroutine[Any, Any, Reply], token: str, result: _Result
    ) -> int:
        """Fill `result` and return the status that a client reads."""
        try:
            reply = await coroutine
            result.head = replace(reply, body=b"", stream=None)
            if reply.stream is None:
                self._add(token, reply.body)
                return reply.status
            async with contextlib.aclosing(_closable(reply)) as rows:
                async for row in rows:
                    self._add(token, row)
        except LmiError as error:
            self._fail(token, error.text)
            if (record := current_record()) is not None:
                record.fault = error.fault
        except Exception:
            logger.exception("a deferred request failed")
            self._fail(token, "Internal server error")
        else:
            return reply.status
        return self._failed

    def _add(self, token: str, piece: bytes) -> None:
        if (result := self._results.get(token)) is not None:
            result.pieces.append(piece)
            self._count(result, len(piece))

    def _fail(self, token: str, text: str) -> None:
        """Keep why a request has failed: the text may repeat a field of megabytes."""
        if (result := self._results.get(token)) is not None:
            result.failure = text
            self._count(result, len(text))

    def _count(self, result: _Result, size: int) -> None:
        result.size += size
        self._bytes += size
        self._evict()

    def _evict(self) -> None:
        """Evict results until the limits hold: a client's finished ones first, then running ones.

        One client's many, or large ones cost no other its own.
        """
        while len(self._results) > 1:
            if len(self._results) > self._capacity:
                held = Counter(result.client for result in self._results.values())
            elif self._bytes > self._max_bytes:
                held = Counter()
                for result in self._results.values():
                    held[result.client] += result.size
            else:
                return
            client, newest = held.most_common(1)[0][0], next(reversed(self._results))
            own = [one for one, result in self._results.items() if result.client == client]
            finished = (one for one in own if self._results[one].is_done and one != newest)
            result = self._results.pop(next(finished, own[0]))
            self._bytes -= result.size
            if result.task is not None and not result.is_done:
                result.task.cancel()


async def _closable(reply: Reply) -> Any:
    """Yield the rows of a reply; closing this one closes its stream, which aborts the engine."""
    if reply.stream is None:
        return
    try:
        async for row in reply.stream:
            yield row
    finally:
        await close_iterator(reply.stream)


def is_deferred(properties: Mapping[str, str]) -> bool:
    """Return whether a request asks for a token instead of its answer."""
    return properties.get(SYNCHRONOUS, "").strip().lower() == "false"


def _max_items(properties: Mapping[str, str]) -> int:
    """Return the limit of pieces in one reply; 0 is no limit."""
    given = properties.get(MAX_ITEMS, "").strip()
    if not given:
        return 0
    if not re.fullmatch(r"0*[1-9]\d{0,8}", given):
        raise BadParameterError(f"{MAX_ITEMS}: expected a whole number above 0 (got {given})")
    return int(given)


def _next(token: str, position: int = 0) -> dict[str, str]:
    shown = f"{token}{position or ''}"
    return {NEXT_TOKEN: shown, "X-Amzn-SageMaker-Custom-Attributes": f"{NEXT_TOKEN}={shown}"}


class Deferrals:
    """Answers deferred requests with a token, and tokens with the result so far."""

    def __init__(self, results: DeferredResults, queue: RequestQueue) -> None:
        self._results = results
        self._queue = queue

    def defer(self, call: InferenceCall, answer: Answer) -> Reply | None:
        """Return a token, or the pieces that a token stands for; None for all other requests.

        Raises:
            BadParameterError: the token is unknown.
            OverloadError: the queue is full: a refusal is answered now, not later.
        """
        if (token := call.properties.get(STARTING_TOKEN)) is not None:
            return self._results.read(token, call.properties)
        if SYNCHRONOUS not in call.properties or not is_deferred(call.properties):
            return None
        self._queue.check_room()
        return self._results.start(answer(call))


def is_process_bound(properties: Mapping[str, str]) -> bool:
    """Whether the request creates or reads a result, which is in this process's memory."""
    return STARTING_TOKEN in properties or is_deferred(properties)


@contextlib.asynccontextmanager
async def deferring(
    service: InferenceService, settings: Settings, _: Mapping[str, str], _events: ServerEvents
) -> AsyncIterator[None]:
    """Defer the answers of requests that ask for it, while the body runs."""
    asked = settings.feature(DeferredSettings)
    results = DeferredResults(
        asked.memory_cache_capacity or DEFAULT_CAPACITY,
        asked.cache_batch,
        statuses=service.statuses,
    )
    service.steps.deferrals.append(Deferrals(results, service.queue).defer)
    service.steps.is_process_bound.append(is_process_bound)
    yield
