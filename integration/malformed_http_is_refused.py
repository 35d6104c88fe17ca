"""Mutated HTTP on raw sockets: whatever the bytes, whole answers or a closed connection.

Below schemathesis, which only sends what an HTTP client can: here framing itself is broken. The
scripted engine, since what is tried never should reach one unharmed.
"""

import contextlib
import http.client
import io
import re
import socket
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.client import call, wait_until
from integration.conftest import StartServer
from integration.slow_clients_are_cut_off import open_socket, read_all

EXAMPLES = 800
QUIET_SECONDS = 0.02
BODY = b'{"inputs": "a", "parameters": {"max_new_tokens": 2}}'
HEAD = b"Host: localhost\r\nContent-Type: application/json\r\n"
SEEDS = (
    b"POST /invocations HTTP/1.1\r\n" + HEAD + b"Content-Length: 52\r\n\r\n" + BODY,
    b"POST /v1/completions HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    b'16\r\n{"prompt": "a", "max_t\r\nf;ext=1\r\nokens": 2, "stre\r\nc\r\nam": true}   \r\n'
    b"0\r\n\r\n",
    b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 2,
    b"PUT /models/lmi/invoke?a=%zz&b=%00 HTTP/1.1\r\n" + HEAD + b"Expect: 100-continue\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 52\r\n\r\n" + BODY,
    b"GET /adapters/%2e%2e/x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
)
PIECES = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff\xfe", b"\xc3\xa9", b"%00", b"../", b"//", b"?",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999999\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip, chunked\r\n", b"Host: b\r\n",
    b"Connection: close\r\n", b"Expect: 200-ok\r\n", b"%zz", b"HTTP/9.9", b"PRI *",
    b"X-Amzn-SageMaker-Session-Id: NEW_SESSION\r\n",
    b"X-Request-Id: " + b"a" * 9000 + b"\r\n", b"ffffffffffffffff\r\n",
)  # fmt: skip
SEPARATORS = re.compile(rb"\r\n|[ :?]")


@st.composite
def wire_bytes(draw: st.DrawFn) -> bytes:
    """Draw one or two requests on a connection, with a few pieces put in, taken out or cut off."""
    data = b"".join(draw(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(1, 3))):
        # Mostly where the grammar has a joint: elsewhere a change is only another name or value.
        joints = [match.start() for match in SEPARATORS.finditer(data)] or [0]
        anywhere = st.integers(0, len(data))
        start = draw(st.one_of(st.sampled_from(joints), anywhere))
        removed = draw(st.integers(0, 6))
        piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=6), st.just(b"")))
        data = data[:start] + piece + data[start + removed :]
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


class _Received:
    """What http.client takes for a socket."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self._file.close = lambda: None  # type: ignore[method-assign] (answers follow each other)

    def makefile(self, *_: Any) -> io.BytesIO:
        return self._file

    @property
    def rest(self) -> bytes:
        return self._file.getvalue()[self._file.tell() :]


def statuses(data: bytes) -> list[int]:
    """Return the status of each answer in `data`.

    Raises:
        http.client.HTTPException: it is no sequence of whole HTTP answers.
    """
    received, found = _Received(data), []
    while received.rest:
        response = http.client.HTTPResponse(received)  # type: ignore[arg-type]
        response.begin()
        if response.status == http.client.SWITCHING_PROTOCOLS:
            raise http.client.HTTPException("switched to another protocol")
        response.read()
        found.append(response.status)
    return found


def exchange(url: str, data: bytes) -> bytes:
    """Send everything and return what the server says until it closes, or has gone quiet.

    A request that lacks its end is not closed by the server for a while, and one whose client has
    closed its half is not answered at all.
    """
    raw = open_socket(url)
    found = b""
    with contextlib.suppress(OSError):  # it may have closed in the middle: what it said counts
        raw.sendall(data)
        raw.settimeout(QUIET_SECONDS)
        while piece := raw.recv(65536):
            found += piece
    with contextlib.suppress(OSError):
        raw.settimeout(30)
        raw.shutdown(socket.SHUT_WR)
    return found + read_all(raw)


def open_files_and_tasks(url: str) -> tuple[float, float]:
    """Return what the process holds."""
    rows = call(url, "/metrics").body.decode().splitlines()
    found = {row.split()[0]: float(row.split()[1]) for row in rows if not row.startswith("#")}
    return found["process_open_fds"], found["lmi_asyncio_tasks"]


def test_broken_framing_is_answered_or_closed(server_process: StartServer) -> None:
    """No 500, no half answer, no trace in the log, nothing left open, and others are served."""
    server = server_process("--demo", "--port", "0", "--engine", "scripted")
    url = server.url_when_ready(20)
    before = open_files_and_tasks(url)
    seen: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(wire_bytes())
    def fuzz(data: bytes) -> None:
        found = statuses(exchange(url, data))
        assert not any(status >= 500 for status in found), f"{found} for {data!r}"
        seen.update(found)

    fuzz()
    assert {200, 400, 404} <= seen
    assert call(url, "/invocations", {"inputs": "a"}).status == 200
    assert wait_until(lambda: open_files_and_tasks(url) <= before, 20), server.describe()
    assert "Traceback" not in server.stderr
