import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from lmi_vllm.errors import DeadlineError
from lmi_vllm.inference.streams import HeldStream, close_iterator, next_within


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
    """Return rows nobody has read."""
    return Rows()


@pytest.fixture
def held(source: Rows) -> HeldStream:
    """Return a stream over the rows that notes when its resources are released."""
    resources = contextlib.AsyncExitStack()
    resources.callback(source.log.append, "released")
    return HeldStream(source.rows(), resources)


async def test_held_stream_releases_though_never_started(source: Rows, held: HeldStream) -> None:
    """A client that goes away before the first byte gives its place back."""
    await held.aclose()
    assert source.log == ["released"]


async def test_held_stream_releases_after_its_rows(source: Rows, held: HeldStream) -> None:
    """In the middle, the rows are closed first: the request ends before its place is free."""
    assert await anext(held) == b"1"
    await held.aclose()
    assert source.log == ["started", "closed", "released"]


async def test_held_stream_releases_once(source: Rows, held: HeldStream) -> None:
    """Closing twice is closing once."""
    async with held:
        assert [row async for row in held] == [b"1", b"2"]
    await held.aclose()
    assert source.log.count("released") == 1


async def test_held_stream_releases_when_closing_rows_fails(source: Rows) -> None:
    """Rows whose end raises do not keep the place."""

    async def failing() -> AsyncGenerator[bytes, None]:
        try:
            yield b"1"
        finally:
            raise ValueError("no")

    resources = contextlib.AsyncExitStack()
    resources.callback(source.log.append, "released")
    stream = HeldStream(failing(), resources)
    await anext(stream)
    with pytest.raises(ValueError, match="no"):
        await stream.aclose()
    assert source.log == ["released"]


async def test_next_within_returns_items_and_end(source: Rows) -> None:
    """Items come as they are; None says that there are no more."""
    rows = source.rows()
    found = [await next_within(rows, 5, "x") for _ in range(3)]
    assert found == [b"1", b"2", None]


async def test_next_within_names_setting_at_deadline() -> None:
    """An expired limit is our error, naming limit and setting, and the iterator is ended."""
    ended = asyncio.Event()

    async def silent() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.set()

    with pytest.raises(DeadlineError, match=r"^no answer within 0\.01 s \(predict_timeout\)$"):
        await next_within(silent(), 0.01, "predict_timeout")
    assert ended.is_set()


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
