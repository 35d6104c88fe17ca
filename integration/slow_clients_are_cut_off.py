"""Slow clients, invalid input and clients that stop reading cost a socket for a bounded time.

Raw sockets against a real process; on the scripted engine where what is proven surrounds one.
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import pytest

from integration.client import call, running_requests, wait_until
from integration.conftest import SCRIPTED, RunningServer, StartServer, running_server

POST = b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def open_socket(url: str, *, receive_bytes: int = 0) -> socket.socket:
    """Return a connection to the server."""
    parts = urlsplit(url)
    raw = socket.socket()
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(30)
    raw.connect((parts.hostname, parts.port))
    return raw


def read_all(raw: socket.socket) -> bytes:
    """Return everything until the server closes, politely or not."""
    found = b""
    try:
        while piece := raw.recv(65536):
            found += piece
    except ConnectionResetError:
        pass
    finally:
        raw.close()
    return found


def drip(raw: socket.socket, seconds: float) -> type[OSError] | None:
    """Send a request that never ends, a header at a time; returns what ended it."""
    deadline = time.monotonic() + seconds
    piece = b"GET /ping HTTP/1.1\r\n"
    while time.monotonic() < deadline:
        try:
            raw.sendall(piece)
        except OSError as error:
            return type(error)
        piece = b"X: y\r\n"
        time.sleep(0.1)
    return None


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server that gives clients one second for each step."""
    environ = {f"LMI_{name}_TIMEOUT": "1" for name in ("HEADER", "BODY", "SEND")}
    folder = tmp_path_factory.mktemp("impatient")
    with running_server(folder, *SCRIPTED, environ=environ) as server:
        yield server


def test_slow_headers_are_cut_off(impatient: RunningServer) -> None:
    """Neither silence nor one header at a time keeps a connection; also not after a request."""
    silent = open_socket(impatient.url)
    assert read_all(silent) == b""
    dripping = open_socket(impatient.url)
    dripping.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    assert dripping.recv(65536).startswith(b"HTTP/1.1 200")
    assert drip(dripping, seconds=30) in (BrokenPipeError, ConnectionResetError)
    dripping.close()
    assert "LMI_HEADER_TIMEOUT" in impatient.process.stderr


def test_slow_body_is_408(impatient: RunningServer) -> None:
    """A body that drips is answered before its connection ends, in the route's own dialect."""
    for path, name in ((b"/invocations", "code"), (b"/v1/completions", "error")):
        raw = open_socket(impatient.url)
        raw.sendall(POST.replace(b"/invocations", path) + b"Content-Length: 9000\r\n\r\n{")
        head, _, body = read_all(raw).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert name in json.loads(body)
        assert b"LMI_BODY_TIMEOUT" in body


def test_idle_connection_stays_open(impatient: RunningServer) -> None:
    """Between requests a client may wait longer than it may take for headers."""
    raw = open_socket(impatient.url)
    for _ in range(2):
        raw.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.settimeout(2)
        with pytest.raises(TimeoutError):
            raw.recv(1)
        raw.settimeout(30)
    raw.close()


def test_slow_reader_is_cut_off_and_its_place_is_free(impatient: RunningServer) -> None:
    """A client that stops reading holds its place in the queue until the time is over."""
    words = " ".join("x" * 200_000 for _ in range(8))  # 64 of them are 13 MB, more than a socket's
    payload = {"inputs": words, "stream": True, "parameters": {"max_new_tokens": 64}}
    body = json.dumps(payload).encode()
    described = "/models/" + call(impatient.url, "/models").json()["models"][0]["modelName"]

    def in_flight() -> int:
        return int(call(impatient.url, described).json()[0]["models"][0]["requestInQueue"])

    with contextlib.ExitStack() as readers:
        for _ in range(10):
            raw = readers.enter_context(open_socket(impatient.url, receive_bytes=4096))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert wait_until(lambda: "LMI_SEND_TIMEOUT" in impatient.process.stderr, 30)
        assert wait_until(lambda: in_flight() == 0, 30)


@pytest.mark.vllm
def test_stalled_readers_do_not_grow_memory(server_process: StartServer) -> None:
    """A stream that is not read keeps memory bounded by its length, and frees it later."""
    environ = {"LMI_SEND_TIMEOUT": "2"}
    server = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
    url = server.url_when_ready()
    process = psutil.Process(server.process.pid)
    grown = []
    for _ in range(3):
        before = process.memory_info().rss
        leave_unread(url, 16)
        grown.append(process.memory_info().rss - before)
    # The first round takes what the later ones take again, or when the garbage collector comes late
    # the second one. What is never freed grows with each. (Here the kernel's buffers hold most of
    # it; what happens when they are full is the test above.)
    assert min(grown[1:]) < 8 << 20, grown
    assert call(url, "/invocations", {"inputs": "a"}).status == 200


def leave_unread(url: str, count: int) -> None:
    """Send so many long streams and read none; returns when all are over."""
    parameters = {"max_new_tokens": 600, "ignore_eos_token": True, "top_n_tokens": 5}
    payload = {"inputs": "Once upon a time", "stream": True, "parameters": parameters}
    body = json.dumps(payload).encode()
    with contextlib.ExitStack() as readers:
        for _ in range(count):
            raw = readers.enter_context(open_socket(url, receive_bytes=4096))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert wait_until(lambda: running_requests(url) > count // 2, 20)
        assert wait_until(lambda: running_requests(url) == 0, 120)
        described = "/models/model"
        assert wait_until(
            lambda: call(url, described).json()[0]["models"][0]["requestInQueue"] == 0, 30
        )


RUDE = {
    "not http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03rubbish\r\n\r\n",
    "long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "long header": b"GET /ping HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /ping HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    "two lengths": POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "length and chunked": POST
    + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative length": POST + b"Content-Length: -1\r\n\r\n",
    "bad chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "bad name": b"GET /ping HTTP/1.1\r\nA B: c\r\n\r\n",
}


@pytest.mark.parametrize("sent", RUDE.values(), ids=RUDE)
def test_malformed_http_is_400_in_json(sent: bytes, shared_scripted_server: RunningServer) -> None:
    """Too much, and what is no HTTP, is refused with our kind of body and no trace in the log."""
    raw = open_socket(shared_scripted_server.url)
    raw.sendall(sent)
    head, _, body = read_all(raw).partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.[01] 4", head), head
    assert json.loads(body)["code"] in (400, 424)
    assert b"Cache-Control: no-cache" in head
    assert len(body) < 1000
    assert "Traceback" not in shared_scripted_server.process.stderr


def test_one_request_is_one_line_in_the_log(shared_scripted_server: RunningServer) -> None:
    """With its path, status and id; aiohttp's own access log is off."""
    call(shared_scripted_server.url, "/models?limit=77")
    assert wait_until(lambda: "limit=77" in shared_scripted_server.process.stderr, 10)
    assert call(shared_scripted_server.url, "/ping").status == 200
    log = shared_scripted_server.process.log
    (line,) = [one for one in log if "limit=77" in str(one)]
    assert (line["logger"], line["path"]) == ("lmi_vllm.requests", "/models?limit=77")
    assert '"GET /models?limit=77 HTTP/1.1" 200' in line["message"]
    assert f"RequestId=[{line['request_id']}]" in line["message"]
