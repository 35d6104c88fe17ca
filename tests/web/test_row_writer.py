"""How the rows of streams reach the wire: framing, and how many writes they take."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lmi_vllm.messages import Reply, ServingProfile
from lmi_vllm.web.connection import FLUSH_BYTES, RowWriter, WriteBatch
from lmi_vllm.web.inference_routes import send
from lmi_vllm.web.request import SERVICE, WRITE_BATCH

Serve = Callable[..., Awaitable[TestServer]]


@dataclass
class CountingTransport:
    """Passes everything on to a transport and keeps what is written."""

    transport: Any
    writes: list[bytes] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Write, and remember it."""
        self.writes.append(bytes(data))
        self.transport.write(data)


@dataclass
class Wire:
    """The transports of all connections, in the order in which they wrote."""

    transports: list[CountingTransport] = field(default_factory=list)

    def watch(self, request: web.Request) -> CountingTransport:
        """Count what the connection of `request` writes from here on."""
        counting = CountingTransport(request.transport)
        request.protocol.transport = counting  # type: ignore[assignment]
        self.transports.append(counting)
        return counting


async def started(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> TestServer:
    """Return a server with one handler."""
    app = web.Application()
    app[WRITE_BATCH] = WriteBatch()
    profile = ServingProfile(model_name="demo")
    app[SERVICE] = SimpleNamespace(profile=profile)  # type: ignore[misc]
    app.router.add_route("*", "/", handler)
    server = TestServer(app)
    await server.start_server()
    return server


async def exchange(server: TestServer, request_line: str) -> bytes:
    """Return all that comes back for a request without headers of interest."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(f"{request_line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def streaming(*rows: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that sends these rows."""

    async def items() -> AsyncIterator[bytes]:
        for row in rows:
            yield row

    async def handler(request: web.Request) -> web.StreamResponse:
        return await send(request, Reply(200, "text/event-stream", stream=items()))

    return handler


FRAMINGS = {
    "HTTP/1.1, a chunk for each row": (
        "POST / HTTP/1.1", True, b"3\r\none\r\n10\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n",
    ),
    "HTTP/1.0, until the connection closes": ("POST / HTTP/1.0", False, b"one" + b"x" * 16),
    "HEAD, no body": ("HEAD / HTTP/1.1", False, b""),
}  # fmt: skip


@pytest.mark.parametrize(("line", "is_chunked", "body"), FRAMINGS.values(), ids=FRAMINGS)
async def test_rows_are_framed_for_the_version_of_http(
    line: str, is_chunked: bool, body: bytes
) -> None:
    """Chunks are for HTTP/1.1; an older client reads until the end; an empty row is no chunk."""
    server = await started(streaming(b"one", b"", b"x" * 16))
    try:
        head, _, found = (await exchange(server, line)).partition(b"\r\n\r\n")
    finally:
        await server.close()
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    assert found == body
    assert (b"Transfer-Encoding: chunked" in head) is is_chunked


async def test_rows_of_one_turn_are_one_write() -> None:
    """What a stream says before the loop turns is one system call, whatever the number of rows."""
    wire = Wire()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        counting = wire.watch(request)
        writer = RowWriter(request, request.app[WRITE_BATCH])
        for row in (b"a", b"bb", b"ccc"):
            writer.write(row)
        assert counting.writes == []
        await asyncio.sleep(0)
        assert counting.writes == [b"1\r\na\r\n2\r\nbb\r\n3\r\nccc\r\n"]
        return response

    server = await started(handler)
    try:
        answer = await exchange(server, "GET / HTTP/1.1")
    finally:
        await server.close()
    assert answer.endswith(b"3\r\nccc\r\n0\r\n\r\n")


async def test_headers_leave_with_the_first_rows() -> None:
    """Nothing is written until the end of the turn in which the first row came."""
    wire, is_asked, may_go = Wire(), asyncio.Event(), asyncio.Event()

    async def items() -> AsyncIterator[bytes]:
        is_asked.set()
        await may_go.wait()
        yield b"one"

    async def handler(request: web.Request) -> web.StreamResponse:
        wire.watch(request)
        return await send(request, Reply(200, "text/event-stream", stream=items()))

    server = await started(handler)
    try:
        answer = asyncio.create_task(exchange(server, "GET / HTTP/1.1"))
        await is_asked.wait()
        (transport,) = wire.transports
        assert transport.writes == []
        may_go.set()
        assert (await answer).endswith(b"\r\n\r\n3\r\none\r\n0\r\n\r\n")
    finally:
        await server.close()
    head, *rows = transport.writes
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rows[0] == b"3\r\none\r\n"


@pytest.mark.parametrize("rows", [(), (b"one",)])
async def test_a_failure_after_the_headers_were_decided_cuts_the_answer(
    rows: tuple[bytes, ...],
) -> None:
    """With or without a row before it: the client sees headers and no end, and no second answer."""

    async def items() -> AsyncIterator[bytes]:
        for row in rows:
            yield row
        raise RuntimeError("early")

    async def handler(request: web.Request) -> web.StreamResponse:
        return await send(request, Reply(200, "text/event-stream", stream=items()))

    server = await started(handler)
    try:
        head, _, body = (await exchange(server, "GET / HTTP/1.1")).partition(b"\r\n\r\n")
    finally:
        await server.close()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(row), row) for row in rows)


async def test_a_stream_without_rows_is_an_empty_answer() -> None:
    """Its headers and the end of its body."""
    server = await started(streaming())
    try:
        answer = await exchange(server, "GET / HTTP/1.1")
    finally:
        await server.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\n0\r\n\r\n")


async def test_rows_that_never_pause_are_written_in_portions() -> None:
    """A stream that has all rows at once does not buffer them all."""
    wire = Wire()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        counting = wire.watch(request)
        writer = RowWriter(request, request.app[WRITE_BATCH])
        writer.write(b"x" * FLUSH_BYTES)
        assert len(counting.writes) == 1
        return response

    server = await started(handler)
    try:
        await exchange(server, "GET / HTTP/1.1")
    finally:
        await server.close()
    assert len(wire.transports) == 1


async def test_streams_write_back_to_back() -> None:
    """Streams with a row in the same turn write only when all of them have spoken."""
    turn, log = WriteBatch(), []

    class Speaker(RowWriter):
        def __init__(self, name: str) -> None:
            self.name = name

        def flush(self) -> None:
            log.append(f"{self.name} writes")

    for name in "ab":
        turn.add(Speaker(name))
        log.append(f"{name} has spoken")
    await asyncio.sleep(0)
    assert log == ["a has spoken", "b has spoken", "a writes", "b writes"]


async def test_write_after_a_disconnect_raises() -> None:
    """The handler of a lost connection ends, as with aiohttp's own write."""
    ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        writer = RowWriter(request, request.app[WRITE_BATCH])
        writer.write(b"late")  # dropped, not an error of the event loop
        assert request.transport is not None
        request.transport.abort()
        try:
            writer.write(b"row")
        except ConnectionError as error:
            ended.set_result(error)
        return response

    server = await started(handler)
    try:
        await exchange(server, "GET / HTTP/1.1")
    except ConnectionError:
        pass
    finally:
        await server.close()
    assert isinstance(ended.result(), ConnectionError)
