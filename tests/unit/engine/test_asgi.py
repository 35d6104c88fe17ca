"""One call of an ASGI application in process: order and backpressure of what goes past a reader."""

import asyncio
from typing import Any

import pytest

from lmi_vllm.engine.vllm.asgi import Exchange
from lmi_vllm.errors import EngineFailureError, LmiError, RequestError
from lmi_vllm.messages import HttpCall

CALL = HttpCall("POST", "/x", "", (), b"", "an-id")


class Direct:
    """Where chunks go of themselves while it is open."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.found: list[bytes] = []

    def read_event(self, event: bytes) -> None:
        """Keep it."""
        self.found.append(event)


def exchange(app: Any, direct: Direct | None) -> Exchange:
    """Return a call of `app`."""
    return Exchange(app, CALL, b"", lambda _: LmiError("failed"), direct)


async def numbers(_scope: Any, _receive: Any, send: Any) -> None:
    """Stream 0 to 9, a turn of the loop between two."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(10):
        await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_headers_are_those_that_came() -> None:
    """In their order, also those that are there twice; a body came unpacked, as long as it is."""
    found: list[tuple[bytes, bytes]] = []
    cookies = [(b"Set-Cookie", b"a=1"), (b"set-cookie", b"b=2")]

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        found.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": cookies})
        await send({"type": "http.response.body", "body": b""})

    came = [
        (b"X-Mine", b"\xc3\xa9"), (b"Content-Encoding", b"gzip"), (b"x-mine", b"2"),
        (b"Content-Length", b"9"), (b"X-Request-Id", b"theirs"), (b"Host", b"a.example"),
    ]  # fmt: skip
    call = HttpCall("POST", "/x", "", came, b"abc", "an-id")
    reply = await Exchange(app, call, b"abc", lambda _: LmiError("failed")).reply()
    assert found == [
        (b"x-mine", b"\xc3\xa9"), (b"x-mine", b"2"), (b"content-length", b"3"),
        (b"x-request-id", b"an-id"),
    ]  # fmt: skip
    assert list(reply.headers.items()) == [("Set-Cookie", "a=1"), ("set-cookie", "b=2")]


async def test_chunks_go_past_a_reader_that_waits() -> None:
    """All but the first, which says that it is a stream, and the last."""
    direct = Direct(is_open=False)
    reply = await exchange(numbers, direct).reply()
    assert reply.stream is not None
    stream = aiter(reply.stream)
    found = [await anext(stream)]
    direct.is_open = True
    found += [chunk async for chunk in stream]
    assert direct.found
    assert found[-1] == b"end"
    assert b"".join([*found[:-1], *direct.found, found[-1]]) == b"0123456789end"


async def test_no_chunk_overtakes_one_that_was_not_taken() -> None:
    """Nor does any while the client has to read first."""
    direct = Direct(is_open=False)
    reply = await exchange(numbers, direct).reply()
    assert reply.stream is not None
    await asyncio.sleep(0.01)  # the next chunk waits for its reader
    direct.is_open = True
    await asyncio.sleep(0.01)
    assert direct.found == []
    direct.is_open = False
    assert b"".join([chunk async for chunk in reply.stream]) == b"0123456789end"
    assert direct.found == []


async def test_nothing_is_written_after_a_disconnect() -> None:
    """Its handler goes on to its end."""
    direct = Direct(is_open=False)
    one = exchange(numbers, direct)
    await one.reply()
    direct.is_open = True
    await one.aclose()
    assert direct.found == []


@pytest.mark.parametrize("is_direct", [False, True], ids=["plain", "direct"])
async def test_stream_that_is_not_read_stops_its_handler(is_direct: bool) -> None:
    """Whatever its length, no more than two chunks are kept for a client that does not read."""
    sent = []

    async def endless(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(10_000):
            sent.append(number)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    one = exchange(endless, Direct(is_open=False) if is_direct else None)
    await one.reply()
    for _ in range(100):  # as many turns as it likes
        await asyncio.sleep(0)
    assert len(sent) <= 3
    await one.aclose()
    assert one._task.done()


async def in_parts(_scope: Any, _receive: Any, send: Any) -> None:
    """Answer as a middleware of Starlette's kind does: whole, but in two messages and an end."""
    headers = [(b"content-length", b"5")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for body in (b"wh", b"ole"):
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_answer_with_a_length_is_whole() -> None:
    """Its client gets that length, too, and no chunks."""
    reply = await exchange(in_parts, None).reply()
    assert (reply.stream, reply.body) == (None, b"whole")


async def test_answer_that_fails_midway_is_an_error() -> None:
    """Its first part is not taken for the whole of it."""

    async def fails(_scope: Any, _receive: Any, send: Any) -> None:
        await in_parts(_scope, _receive, _without_end(send))
        raise ValueError

    with pytest.raises(EngineFailureError, match="no whole answer"):
        await exchange(fails, None).reply()


def _without_end(send: Any) -> Any:
    async def some(message: Any) -> None:
        if message.get("more_body", True):
            await send(message)

    return some


async def test_internal_names_are_replaced_in_every_chunk() -> None:
    """Of a stream as of a whole answer, also in those that go past the reader."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"<key>", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"<key>.", "more_body": False})

    direct = Direct(is_open=False)
    error = LmiError("failed")
    reply = await Exchange(app, CALL, b"", lambda _: error, direct, (b"key", b"fr")).reply()
    assert reply.stream is not None
    stream = aiter(reply.stream)
    found = [await anext(stream)]
    direct.is_open = True
    found += [chunk async for chunk in stream]
    assert b"".join([*direct.found, *found]) == b"<fr>" * 4 + b"."


async def test_stream_that_fails_behind_a_middleware_is_an_error() -> None:
    """Starlette's kind ends the answer first and raises then: the end would look complete."""

    async def fails(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        await asyncio.sleep(0)
        raise ValueError

    reply = await exchange(fails, None).reply()
    assert reply.stream is not None
    stream = aiter(reply.stream)
    assert await anext(stream) == b"some"
    with pytest.raises(LmiError, match="failed"):
        await anext(stream)


@pytest.mark.parametrize(("error", "lines"), [(RequestError("theirs"), 0), (LmiError("ours"), 1)])
async def test_fault_of_the_client_in_a_stream_is_no_error_in_the_log(
    error: LmiError, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the stream says it."""

    async def fails(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise ValueError

    reply = await Exchange(fails, CALL, b"", lambda _: error, None).reply()
    assert reply.stream is not None
    with pytest.raises(LmiError, match=error.text):
        [chunk async for chunk in reply.stream]
    assert len(caplog.records) == lines
