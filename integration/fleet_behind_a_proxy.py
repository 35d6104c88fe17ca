"""Three servers behind HAProxy, nginx or Envoy, 24 adapters in S3: killed, rolled, a fourth joins.

The short form of `make fleet`, on the scripted engine. It proves that no request is lost, because
the proxy retries 503 and cut connections on another server. Each request is answered by its
adapter. Every server has exactly the adapters that calls through the proxy have registered and not
removed.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from integration.client import call, wait_until
from integration.conftest import RunningServer, StartServer
from integration.fleet.events import Plan, called_adapters, run
from integration.fleet.proxies import PROXIES, free_ports, is_installed
from tests.support.adapter_files import CAPITALS

ALWAYS = "haproxy"  # each of the others takes a minute more, for the same course
CASES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not is_installed(name), reason=f"needs {name}: {PROXIES[name].how_to_install}"
            ),
            pytest.mark.skipif(
                name != ALWAYS and "LMI_TEST_PROXIES" not in os.environ,
                reason="needs LMI_TEST_PROXIES=1",
            ),
        ],
    )
    for name in PROXIES
]


@pytest.mark.parametrize("proxy", CASES)
def test_fleet_loses_no_request_and_crosses_no_adapter(
    server_process: StartServer, tmp_path: Path, proxy: str
) -> None:
    """A kill -9, a fourth server, a rolling restart, calls through whichever answers."""
    found = run(Plan(proxy), server_process, tmp_path)
    load = found.load
    assert (load.lost, load.cut, load.crossed, found.unknown) == ([], [], [], [])
    # A killed server is named until its last report is a minute old.
    removed = found.calls[-1]
    assert removed.startswith(("removed: 200", "removed: 202"))
    assert removed.count("has not read the change") == removed.startswith("removed: 202")


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], int]) -> Iterator[int]:
    """Run a server of these answers' statuses; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.send_response(answer(self))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.skipif(not is_installed(ALWAYS), reason=f"needs {ALWAYS}")
def test_server_that_is_slow_to_say_ready_is_not_left_out(tmp_path: Path) -> None:
    """On a machine that is busy for a moment all checks are late: every request would be lost."""
    checks: list[str] = []

    def slow(request: BaseHTTPRequestHandler) -> int:
        if request.path == "/ready":
            time.sleep(1.0)  # three times the pause between two checks
            checks.append(request.path)
        return 200

    (port,) = free_ports(1)
    with answering(slow) as at, PROXIES[ALWAYS].running(tmp_path, port, [at]) as url:
        assert wait_until(lambda: len(checks) >= 4, 60)
        assert call(url, "/").status == 200


@pytest.mark.skipif(not is_installed(ALWAYS), reason=f"needs {ALWAYS}")
def test_request_with_a_long_prompt_is_tried_on_another_server(tmp_path: Path) -> None:
    """By default HAProxy does not repeat what is larger than 16 KiB."""
    (port,) = free_ports(1)
    asked: set[tuple[int, str]] = set()

    def full(request: BaseHTTPRequestHandler) -> int:
        asked.add((503, request.path))
        return 200 if request.path == "/ready" else 503

    def free(request: BaseHTTPRequestHandler) -> int:
        asked.add((200, request.path))
        return 200

    body = {"inputs": "x" * 200_000}
    with (
        answering(full) as one,
        answering(free) as other,
        PROXIES[ALWAYS].running(tmp_path, port, [one, other]) as url,
    ):
        assert wait_until(lambda: {(503, "/ready"), (200, "/ready")} <= asked, 60)
        assert [call(url, "/invocations", body).status for _ in range(6)] == [200] * 6
        assert (503, "/invocations") in asked


def test_adapter_is_seen_behind_a_page_of_others(scripted_server: RunningServer) -> None:
    """A server that has served more than a hundred adapters lacks none that a call registered."""
    url, source = scripted_server.url, str(CAPITALS)
    for name in (*(f"a{number}" for number in range(120)), "called-3"):
        assert call(url, "/adapters", {"name": name, "src": source}).status == 200
    assert called_adapters(url) == {"called-3"}
