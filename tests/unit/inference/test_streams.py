import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

import pytest

from lmi_vllm.errors import DeadlineError
from lmi_vllm.inference.response.streams import (
    Deadline,
    ReplyStream,
    SilenceLimit,
    close_iterator,
)


class Rows:
    """Rows that remember whether they were started and closed."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def rows(self) -> AsyncGenerator[bytes, None]:
        """Yield two rows."""
        self.log.append("started")
        try:
            yield b"1"
            yield b"2"
        finally:
            self.log.append("closed")


@pytest.fixture
def source() -> Rows:
    """Return rows that have not been read."""
    return Rows()


@pytest.fixture
def held(source: Rows) -> ReplyStream:
    """Return a stream over the rows that notes when its resources are released."""
    resources = contextlib.AsyncExitStack()
    resources.callback(source.log.append, "released")
    return ReplyStream(source.rows(), resources.aclose)


async def test_reply_stream_releases_though_never_started(source: Rows, held: ReplyStream) -> None:
    """A client that disconnects before the first byte gives its place back."""
    await held.aclose()
    assert source.log == ["released"]


async def test_reply_stream_releases_after_its_rows(source: Rows, held: ReplyStream) -> None:
    """In the middle, the rows are closed first: the request ends before its place is free."""
    assert await anext(held) == b"1"
    await held.aclose()
    assert source.log == ["started", "closed", "released"]


async def test_reply_stream_releases_once(source: Rows, held: ReplyStream) -> None:
    """Closing twice is closing once."""
    async with contextlib.aclosing(held):
        assert [row async for row in held] == [b"1", b"2"]
    await held.aclose()
    assert source.log.count("released") == 1


async def test_reply_stream_releases_when_closing_rows_fails(source: Rows) -> None:
    """Rows whose end raises do not keep the place."""

    async def failing() -> AsyncGenerator[bytes, None]:
        try:
            yield b"1"
        finally:
            raise ValueError("no")

    resources = contextlib.AsyncExitStack()
    resources.callback(source.log.append, "released")
    stream = ReplyStream(failing(), resources.aclose)
    await anext(stream)
    with pytest.raises(ValueError, match="no"):
        await stream.aclose()
    assert source.log == ["released"]


async def test_silence_limit_returns_items_and_end(source: Rows) -> None:
    """Items come as they are; None says that there are no more."""
    rows, limit = source.rows(), SilenceLimit(5, "x")
    found = [await limit.next(rows) for _ in range(3)]
    limit.close()
    assert found == [b"1", b"2", None]


async def test_silence_limit_names_setting_at_deadline() -> None:
    """An expired limit is our error, naming limit and setting, and the iterator is ended."""
    ended = asyncio.Event()

    async def silent() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"^no answer within 0\.01 s \(predict_timeout\)$"):
        await SilenceLimit(0.01, "predict_timeout").next(silent())
    assert ended.is_set()


async def test_silence_limit_does_not_count_between_waits() -> None:
    """A reader that takes longer than the limit between two items is no silence of the stream."""
    limit = SilenceLimit(0.01, "chunked_read_timeout")

    async def ready() -> AsyncGenerator[int, None]:
        yield 1
        yield 2

    rows = ready()
    assert await limit.next(rows) == 1
    await asyncio.sleep(0.05)
    assert await limit.next(rows) == 2
    limit.close()


async def test_silence_limit_arms_one_timer_for_many_items() -> None:
    """A timer for each item would cost a tenth of what a token costs."""
    loop, armed = asyncio.get_running_loop(), []
    call_at = loop.call_at

    def counted(when: float, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        armed.append(when)
        return call_at(when, callback, *args)

    async def numbers() -> AsyncGenerator[int, None]:
        for number in range(1, 100):
            yield number

    limit, rows = SilenceLimit(60, "predict_timeout"), numbers()
    loop.call_at = counted  # type: ignore[method-assign,assignment]
    try:
        while await limit.next(rows) is not None:
            pass
    finally:
        limit.close()
        del loop.call_at
    assert len(armed) == 1


async def test_silence_limit_counts_what_is_written_to_its_sink() -> None:
    """Rows that a client got during the wait put its end off, from when they were written."""

    class Sink:
        is_paused = False
        written_at = asyncio.get_running_loop().time() + 1000

        def put(self, row: bytes) -> None:
            raise AssertionError(row)

    loop, armed, has_looked = asyncio.get_running_loop(), [], asyncio.Event()
    call_at = loop.call_at

    def counted(when: float, callback: Callable[..., None], *args: object) -> asyncio.TimerHandle:
        armed.append(when)
        if len(armed) > 1:
            has_looked.set()
        return call_at(when, callback, *args)

    limit = SilenceLimit(0.01, "x")
    limit.sink = Sink()
    loop.call_at = counted  # type: ignore[method-assign,assignment]
    try:
        task = asyncio.ensure_future(limit.within(asyncio.Event().wait()))
        looked = asyncio.ensure_future(has_looked.wait())
        await asyncio.wait((task, looked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        del loop.call_at
    assert armed[1:] == [Sink.written_at + 0.01]
    assert not task.done()
    task.cancel()
    limit.close()


async def test_silence_limit_that_got_shorter_is_kept() -> None:
    """The first item may take long, the others not: the shorter limit holds from then on."""
    limit = SilenceLimit(60, "predict_timeout")

    async def one_and_silence() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.Event().wait()

    rows = one_and_silence()
    assert await limit.next(rows) == 1
    limit.seconds, limit.setting = 0.01, "chunked_read_timeout"
    with pytest.raises(DeadlineError, match=r"0\.01 s \(chunked_read_timeout\)"):
        await asyncio.wait_for(limit.next(rows), 5)


async def test_silence_limit_passes_a_cancellation_on() -> None:
    """Only the limit's own cancellation becomes a deadline; a client's going away stays one."""
    limit, waiting = SilenceLimit(60, "x"), asyncio.Event()

    async def silent() -> AsyncGenerator[int, None]:
        waiting.set()
        await asyncio.Event().wait()
        yield 1

    task = asyncio.ensure_future(limit.next(silent()))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    limit.close()


async def test_deadline_names_its_setting() -> None:
    """Also where the body itself has run out of time."""
    for body in (asyncio.sleep(10), asyncio.wait_for(asyncio.sleep(10), 0.001)):
        with pytest.raises(DeadlineError, match=r"within 0.05 s \(predict_timeout\)"):
            async with Deadline(0.05, "predict_timeout"):
                await body


async def test_deadline_passes_on_what_is_not_its_own() -> None:
    """An error of the body, the end of its task, and its result."""
    with pytest.raises(ValueError, match="of the body"):
        async with Deadline(5, "predict_timeout"):
            raise ValueError("of the body")

    async def waits() -> None:
        async with Deadline(5, "predict_timeout"):
            await asyncio.sleep(10)

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with Deadline(5, "predict_timeout"):
        await asyncio.sleep(0)


async def test_close_iterator_accepts_any_iterator(source: Rows) -> None:
    """Iterators without aclose need none; generators are closed."""

    class Plain:
        def __aiter__(self) -> "Plain":
            return self

        async def __anext__(self) -> bytes:
            raise StopAsyncIteration

    await close_iterator(Plain())
    rows = source.rows()
    await anext(rows)
    await close_iterator(rows)
    assert source.log == ["started", "closed"]
