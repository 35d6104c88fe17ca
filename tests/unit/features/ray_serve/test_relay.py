"""The relay passes requests and answers on as they come, and ends what one side has left."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from lmi_vllm.features.ray_serve.relay import Message, Relay
from lmi_vllm.features.ray_serve.server_connection import ServerGoneError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
WAIT = 5.0


class Client:
    """The two functions of an ASGI call; what is sent to it is kept."""

    def __init__(self, *pieces: bytes) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        for number, piece in enumerate(pieces or (b"",), 1):
            more = number < len(pieces)
            self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self.got: list[Message] = []
        self.has_got = asyncio.Event()

    async def receive(self) -> Message:
        """Return the next piece of the request, once it is there."""
        return await self.messages.get()

    async def send(self, message: Message) -> None:
        """Keep a message of the answer."""
        self.got.append(message)
        self.has_got.set()

    def leave(self) -> None:
        """Disconnect."""
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        """What has come of the answer's body."""
        return b"".join(message.get("body", b"") for message in self.got)


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[[Handler], Awaitable[Relay]]]:
    """Run a server of one handler on a Unix socket, and a relay to it."""
    runners, relays = [], []

    async def start(handler: Handler) -> Relay:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runners.append(runner := web.AppRunner(app, handler_cancellation=True))
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        relays.append(relay := Relay(str(tmp_path / "s")))
        return relay

    yield start
    for relay in relays:
        await relay.close()
    for runner in runners:
        await runner.cleanup()


def scope(path: str = "/a", headers: Any = (), **fields: Any) -> dict[str, Any]:
    """Return what an ASGI server says of a request."""
    return {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": list(headers), **fields,
    }  # fmt: skip


async def test_request_arrives_as_it_was_sent(serve: Any) -> None:
    """Target, headers that are not of a connection, a body in pieces; below Ray's prefix."""
    seen: list[Any] = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.method, request.raw_path, request.headers, await request.read()))
        return web.Response(status=418, headers={"X-Own": "1"}, body=b"short")

    relay, client = await serve(note), Client(b"ab", b"c" * 100_000, b"d")
    headers = [(b"x-a", "é".encode()), (b"x-a", b"2"), (b"te", b"x"), (b"expect", b"100-continue")]
    given = scope("/ray/a%20b", headers, query_string=b"q=%2F", root_path="/ray")
    await relay(given, client.receive, client.send)
    method, path, found, body = seen[0]
    assert (method, path) == ("POST", "/a%20b?q=%2F")
    assert body == b"ab" + b"c" * 100_000 + b"d"
    assert found.getall("X-A") == ["é", "2"]
    assert not {"TE", "Expect", "User-Agent", "Accept", "Content-Type"} & set(found)
    start = client.got[0]
    assert start["status"] == 418
    assert (b"x-own", b"1") in start["headers"]
    assert (b"content-length", b"5") in start["headers"]
    assert not {b"date", b"server"} & dict(start["headers"]).keys()
    assert client.body == b"short"
    assert [m.get("more_body") for m in client.got[1:]][-1] is False


async def test_rows_come_when_they_are_written(serve: Any) -> None:
    """Each before the next is made."""
    next_row = asyncio.Event()

    async def rows(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            await response.write(b"%d\n" % number)
            next_row.clear()
            await next_row.wait()
        return response

    relay, client = await serve(rows), Client()
    asked = asyncio.create_task(relay(scope(), client.receive, client.send))
    for number in range(3):
        async with asyncio.timeout(WAIT):
            while not client.body.endswith(b"%d\n" % number):
                client.has_got.clear()
                await client.has_got.wait()
        next_row.set()
    await asked
    assert client.body == b"0\n1\n2\n"


@pytest.mark.parametrize("way", ["message", "cancelled"])
@pytest.mark.parametrize("has_begun", [True, False])
async def test_client_that_leaves_ends_the_request(serve: Any, way: str, has_begun: bool) -> None:
    """Whether the ASGI server says so in a message or cancels the call, as Ray does."""
    is_there, is_ended = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            if has_begun:
                await response.prepare(request)
                await response.write(b"row\n")
            is_there.set()
            await asyncio.Event().wait()
        finally:
            is_ended.set()
        return response

    relay, client = await serve(endless), Client(b"body")
    asked = asyncio.create_task(relay(scope(), client.receive, client.send))
    async with asyncio.timeout(WAIT):
        await is_there.wait()
        if way == "message":
            client.leave()
            await asked
        else:
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        await is_ended.wait()


async def test_cut_answer_is_no_whole_one(serve: Any) -> None:
    """The last message is missing, so that the client's connection is cut as well."""

    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"row\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    relay, client = await serve(cut), Client()
    with pytest.raises(ServerGoneError):
        await relay(scope(), client.receive, client.send)
    assert client.got[0]["status"] == 200
    assert all(message.get("more_body", True) for message in client.got)


async def test_server_that_is_gone_is_503_with_the_time_to_come_back(tmp_path: Path) -> None:
    """So that clients and proxies try again."""
    relay, client = Relay(str(tmp_path / "nothing")), Client(b"body")
    await relay(scope(), client.receive, client.send)
    assert client.got[0]["status"] == 503
    assert dict(client.got[0]["headers"])[b"retry-after"] == b"1"
    assert b'"code": 503' in client.body
    status, reason = await relay.get("/health")
    assert status == 0
    assert b"nothing" in reason
    await relay.close()


async def test_slow_client_holds_the_server_back(serve: Any) -> None:
    """Where the ASGI server waits in `send`, the server's own writes wait."""
    written = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(400):
            await response.write(b"x" * 65536)
            written += 65536
        return response

    relay, client, may_go_on = await serve(flood), Client(), asyncio.Event()

    async def slow_send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await may_go_on.wait()
        await client.send(message)

    asked = asyncio.create_task(relay(scope(), client.receive, slow_send))
    await asyncio.sleep(0.5)
    assert 0 < written < 4 << 20
    may_go_on.set()
    await asked
    assert len(client.body) == 400 * 65536


async def test_connection_serves_one_request_after_the_other(serve: Any) -> None:
    """Whole answers leave it free; one whose request was not read to its end does not."""
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.transport)
        if request.headers.get("X-Read"):
            await request.read()
        return web.Response(body=b"whole")

    relay = await serve(note)
    for _ in range(2):
        client = Client(b"body")
        headers = [(b"content-length", b"4"), (b"x-read", b"1")]
        await relay(scope(headers=headers), client.receive, client.send)
        assert client.body == b"whole"
    assert seen[0] is seen[1]
    early = Client(b"part")
    early.messages.get_nowait()
    early.messages.put_nowait({"type": "http.request", "body": b"part", "more_body": True})
    await relay(scope(headers=[(b"content-length", b"99")]), early.receive, early.send)
    assert early.body == b"whole"
    last = Client(b"body")
    await relay(scope(headers=[(b"content-length", b"4")]), last.receive, last.send)
    assert (last.body, seen[2], seen[3] is seen[2]) == (b"whole", seen[0], False)


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_answer_to_head_has_no_body(serve: Any, method: str) -> None:
    """Its length is that of GET's, and nothing is waited for."""

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=b"whole")

    relay = await serve(whole)
    for _ in range(2):
        client = Client()
        async with asyncio.timeout(WAIT):
            await relay(scope(method=method), client.receive, client.send)
        assert (b"content-length", b"5") in client.got[0]["headers"]
        assert client.body == (b"whole" if method == "GET" else b"")


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/a", [(b"x-a", b"b\r\nx-b: c")]), ("/a", [(b"x\na", b"b")]), ("/a\r\nx-b: c", [])],
)
async def test_line_break_makes_no_header(serve: Any, path: str, headers: Any) -> None:
    """Nothing of it reaches the server: what Ray's proxy adds may come from a body."""
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response()

    relay, client = await serve(note), Client()
    await relay(scope(path, headers), client.receive, client.send)
    assert client.got[0]["status"] == 400
    assert not seen


async def test_header_of_ray_is_not_passed_on(serve: Any) -> None:
    """It is for the way to the replica."""
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.headers)
        return web.Response()

    relay, client = await serve(note), Client()
    headers = [(b"serve_multiplexed_model_id", b"fr"), (b"x-a", b"1")]
    await relay(scope(headers=headers), client.receive, client.send)
    assert {name.lower() for name in seen[0]} == {"x-a", "host"}


def test_event_loop_of_ray_serves_as_well(tmp_path: Path) -> None:
    """Ray takes uvloop, whose transports are of other classes."""

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def ask() -> bytes:
        app = web.Application(client_max_size=1 << 22)
        app.router.add_post("/a", whole)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        relay, client = Relay(str(tmp_path / "s")), Client(b"x" * 1_000_000, b"y" * 1_000_000)
        await relay(scope(), client.receive, client.send)
        await relay.close()
        await runner.cleanup()
        return client.body

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == b"x" * 1_000_000 + b"y" * 1_000_000


HIDDEN = b"POST /hidden HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("headers", "pieces"),
    [
        ([(b"content-length", b"4")], [b"body" + HIDDEN]),
        ([(b"content-length", b"4")], [b"bo", b"dy" + HIDDEN]),
        ([(b"content-length", b"4")], [b"body", HIDDEN]),
        ([(b"content-length", b"4"), (b"transfer-encoding", b"chunked")], [b"body" + HIDDEN]),
        ([(b"content-length", b"4"), (b"transfer-encoding", b"chunked")], [b"body", HIDDEN]),
    ],
)
async def test_body_holds_no_second_request(serve: Any, headers: Any, pieces: list[bytes]) -> None:
    """Its answer would be that of the next client on the connection."""
    seen = []

    async def note(request: web.Request) -> web.Response:
        seen.append((request.path, await request.read()))
        return web.Response(body=request.path.encode())

    relay = await serve(note)
    for path in ("/one", "/two"):
        client = Client(*(pieces if path == "/one" else [b"body"]))
        given = headers if path == "/one" else [(b"content-length", b"4")]
        async with asyncio.timeout(WAIT):
            await relay(scope(path, given), client.receive, client.send)
        assert client.body == path.encode()
    is_coded = len(headers) > 1
    assert seen == [("/one", b"".join(pieces) if is_coded else b"body"), ("/two", b"body")]


async def test_body_that_is_too_short_keeps_no_connection(serve: Any) -> None:
    """The server would take what the next client sends for its rest."""

    async def early(request: web.Request) -> web.Response:
        return web.Response(body=request.path.encode())

    relay = await serve(early)
    for path, length in (("/one", b"99"), ("/two", b"4")):
        client = Client(b"body")
        async with asyncio.timeout(WAIT):
            headers = [(b"content-length", length)]
            await relay(scope(path, headers), client.receive, client.send)
        assert client.body == path.encode()


async def test_answer_that_no_one_asked_for_is_not_the_next_one(tmp_path: Path) -> None:
    """What comes on a connection between two requests ends it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for text in (b"first", b"stray"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + text)
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_unix_server(answer, str(tmp_path / "s"))
    relay = Relay(str(tmp_path / "s"))
    for _ in range(2):
        client = Client()
        async with asyncio.timeout(WAIT):
            await relay(scope(), client.receive, client.send)
        assert client.body == b"first"
        await asyncio.sleep(0.3)
    await relay.close()
    server.close()
    await server.wait_closed()


async def test_error_of_the_client_s_side_ends_the_request(serve: Any) -> None:
    """The server would wait for the rest of the body."""
    is_ended = asyncio.Event()

    async def read(request: web.Request) -> web.Response:
        try:
            return web.Response(body=await request.read())
        finally:
            is_ended.set()

    relay, client = await serve(read), Client()
    client.messages.get_nowait()
    client.messages.put_nowait({"type": "http.request", "body": b"part", "more_body": True})

    async def receive() -> Message:
        if client.messages.empty():
            raise OSError("lost")
        return await client.receive()

    async with asyncio.timeout(WAIT):
        await relay(scope(), receive, client.send)
        await is_ended.wait()
    assert client.got[0]["status"] == 503
