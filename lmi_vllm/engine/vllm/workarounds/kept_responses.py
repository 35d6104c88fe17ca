"""Responses that vLLM's handler of the Responses API keeps (`VLLM_ENABLE_RESPONSES_API_STORE`).

vLLM keeps them in three dictionaries, by an id that the client may choose (`request_id`), for every
client and to its end. Here an id belongs to the API key that sent it: another key finds nothing to
read, to continue or to cancel. What is kept is bounded; the key that has the most loses its oldest.

vLLM ends the events of a response in the background with `response.completed` only. One that was
cancelled has no such event, so that its readers would wait for ever.

Upstream: not reported that we know of; vLLM's own warning says that this store may leak memory.
Releases: 0.31 and later.
Shows: a client cancels another one's response. Ten responses with 18 MB of metadata take 270 MB,
    which are never freed; 30000 short texts in it are 0.45 MB and take 5 MB. A stream of a
    cancelled response does not end.
May go: when test_plain_vllm_keeps_every_response_for_everyone and
    test_plain_vllm_never_ends_the_stream_of_a_cancelled_response fail.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from lmi_vllm.telemetry.records import current_record

MOST: Final = 1000  # responses
MOST_BYTES: Final = 256 << 20  # of all together, estimated
_MESSAGES: Final = "msg_store"  # vLLM fills it first
_RESPONSE: Final = "response_store"
_EVENTS: Final = "event_store"
_VALUE_BYTES: Final = 160  # of a name and a short text in an object that is kept
_TOKEN_BYTES: Final = 16
_EVENT_BYTES: Final = 1 << 10
_LOGPROB_BYTES: Final = 256
# What the request of this task has sent, with the conversation that it continues.
_SENT_BYTES: Final[ContextVar[int]] = ContextVar("lmi_vllm_sent_bytes", default=0)

_Key = tuple[int | None, str]  # the client's API key, and the id


def keep_by_client(handler: Any, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
    """Let the handler keep the responses of each client apart, within bounds; end its streams."""
    kept = _Kept(most, most_bytes)
    handler.msg_store = _OwnView(kept, _MESSAGES)
    handler.response_store = _OwnView(kept, _RESPONSE)
    handler.event_store = _OwnView(kept, _EVENTS)
    handler.background_tasks = BackgroundTasks()
    plain = handler.responses_background_stream_generator
    handler.responses_background_stream_generator = partial(_events, handler, plain)


def note_request(handler: Any, body: bytes, previous: object) -> None:
    """Say what the request of this task costs if its response is kept."""
    store = getattr(handler, _RESPONSE, None)
    if isinstance(store, _OwnView):
        size = len(body) + body.count(b",") * _VALUE_BYTES
        _SENT_BYTES.set(size + store.sent_bytes(previous))


def _own(response_id: str) -> _Key:
    record = current_record()
    return None if record is None else record.key, response_id


@dataclass(slots=True)
class _Response:
    """What vLLM keeps of one response, by the names of its dictionaries."""

    sent_bytes: int
    parts: dict[str, Any] = field(default_factory=dict)
    is_ended: bool = False

    @property
    def size(self) -> int:
        response, (events, _) = self.parts.get(_RESPONSE), self.parts.get(_EVENTS, ((), None))
        top = getattr(response, "top_logprobs", None) or 0
        usage = getattr(response, "usage", None)
        tokens = 0 if usage is None else usage.output_tokens
        logprobs = (tokens + len(events)) * top * _LOGPROB_BYTES
        return self.sent_bytes + tokens * _TOKEN_BYTES + len(events) * _EVENT_BYTES + logprobs


class _Kept:
    """The responses of all clients, oldest first."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.responses: OrderedDict[_Key, _Response] = OrderedDict()

    def add(self, key: _Key) -> _Response:
        """Return what is kept of a response from now on."""
        response = self.responses[key] = _Response(_SENT_BYTES.get())
        record = current_record()
        if record is None:
            response.is_ended = True
        else:
            record.at_end.append(partial(self._end, key, response))
        self._evict()
        return response

    def _end(self, key: _Key, response: _Response) -> None:
        response.is_ended = True
        if _RESPONSE not in response.parts and self.responses.get(key) is response:
            del self.responses[key]  # its request has failed
        self._evict()

    def _evict(self) -> None:
        """Drop what the client that has the most has ended first, until the bounds hold."""
        sizes = {key: response.size for key, response in self.responses.items()}
        total = sum(sizes.values())
        while (is_many := len(self.responses) > self._most) or total > self._most_bytes:
            held: Counter[int | None] = Counter()
            for key, size in sizes.items():
                held[key[0]] += 1 if is_many else size
            ended = [key for key, response in self.responses.items() if response.is_ended]
            if not ended:
                return  # the queue bounds those that run
            owner = max((key[0] for key in ended), key=held.__getitem__)
            oldest = next(key for key in ended if key[0] == owner)
            del self.responses[oldest]
            total -= sizes.pop(oldest)


class _OwnView(MutableMapping[str, Any]):
    """One of vLLM's dictionaries: the part that belongs to the client of the current request."""

    def __init__(self, kept: _Kept, name: str) -> None:
        self._kept = kept
        self._name = name

    def sent_bytes(self, response_id: object) -> int:
        """Return what the client has sent for the conversation up to this response."""
        known = (
            self._kept.responses.get(_own(response_id)) if isinstance(response_id, str) else None
        )
        return 0 if known is None else known.sent_bytes

    def __getitem__(self, response_id: str) -> Any:
        return self._kept.responses[_own(response_id)].parts[self._name]

    def __setitem__(self, response_id: str, part: Any) -> None:
        key = _own(response_id)
        response = self._kept.responses.get(key)
        if response is None:
            if self._name != _MESSAGES:
                return  # dropped: without its messages it cannot be continued
            response = self._kept.add(key)
        response.parts[self._name] = part

    def __delitem__(self, response_id: str) -> None:
        del self._kept.responses[_own(response_id)].parts[self._name]

    def __iter__(self) -> Iterator[str]:
        owner, _ = _own("")
        responses = tuple(self._kept.responses.items())
        return (key[1] for key, one in responses if key[0] == owner and self._name in one.parts)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class BackgroundTasks(dict[Any, asyncio.Task[Any]]):
    """vLLM's background responses; what their requests hold is kept until they end."""

    def __setitem__(self, response_id: str, task: asyncio.Task[Any]) -> None:
        super().__setitem__(_own(response_id), task)
        record = current_record()
        if record is not None and record.keep is not None:
            record.keep(task)

    def get(self, response_id: str, default: Any = None) -> Any:
        """Return the task of the client's own response."""
        return super().get(_own(response_id), default)

    def pop(self, response_id: str, *default: Any) -> Any:
        """Forget the task; called in the context of the request that began it."""
        return super().pop(_own(response_id), *default)


async def _events(
    handler: Any, plain: Any, response_id: str, starting_after: int | None = None
) -> AsyncIterator[Any]:
    """Yield the events of a response in the background; its end is theirs."""
    if response_id not in handler.event_store:
        async for event in plain(response_id, starting_after):  # raises vLLM's error
            yield event
        return
    events, news = handler.event_store[response_id]
    task = handler.background_tasks.get(response_id)
    position = 0 if starting_after is None else max(0, starting_after + 1)
    while True:
        while position < len(events):
            yield events[position]
            position += 1
        if task is None or task.done():
            return
        news.clear()
        waiter = asyncio.ensure_future(news.wait())
        try:
            await asyncio.wait({waiter, task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
