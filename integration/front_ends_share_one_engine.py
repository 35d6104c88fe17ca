"""Two front-end processes over one real engine: one server to every client.

Each scenario asks both processes: a connection belongs to the one that accepted it, which the
kernel tells (`through`).
"""

import contextlib
import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from integration.client import Answer, call, connect, running_requests, wait_until
from integration.conftest import RunningServer, ServerProcess, StartServer, running_server
from integration.processes_of_a_server import (
    further_front_ends,
    is_of_the_front,
)
from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.features.front_ends.group import SPARE_CLIENTS
from lmi_vllm.features.front_ends.hanging import LIVENESS_SECONDS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.random_order(disabled=True),  # the last ones end the shared server
]

PROMPT = "The capital of France is"
SHORT: Mapping[str, Any] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}
LONG: Mapping[str, Any] = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1500, "ignore_eos_token": True},
    "stream": True,
}
LIMIT = 6
ADAPTERS = DEMO_MODEL_DIR / "adapters"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of two front-end processes."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    environ = {"LMI_FRONTEND_PROCESSES": "2", "SERVING_JOB_QUEUE_SIZE": str(LIMIT)}
    folder = tmp_path_factory.mktemp("two")
    with running_server(folder, "--demo", environ=environ) as server:
        yield server


def front_ends(server: ServerProcess) -> list[int]:
    """Return the process ids of all front-end processes, the first one first."""
    others = (process.pid for process in further_front_ends(server.process.pid))
    return [server.process.pid, *sorted(others)]


def through(url: str, pid: int) -> http.client.HTTPConnection:
    """Return a connection that this process has accepted."""
    for _ in range(200):
        connection = connect(url)
        connection.connect()
        assert connection.sock is not None
        port = connection.sock.getsockname()[1]

        def is_there(port: int = port) -> bool:
            peers = psutil.Process(pid).net_connections("tcp")
            return any(peer.raddr and peer.raddr.port == port for peer in peers)

        if wait_until(is_there, 0.1):
            return connection
        connection.close()
    raise AssertionError(f"process {pid} accepts no connection")


def ask(
    url: str,
    pid: int,
    path: str,
    payload: object = None,
    method: str = "",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask one of the processes."""
    return ask_on(through(url, pid), path, payload, method, headers)


def ask_on(
    connection: http.client.HTTPConnection,
    path: str,
    payload: object = None,
    method: str = "",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Ask on an open connection, which is closed afterwards."""
    try:
        body = None if payload is None else json.dumps(payload).encode()
        given = {"Content-Type": "application/json"} if body else {}
        connection.request(
            method or ("POST" if body else "GET"), path, body, {**given, **(headers or {})}
        )
        response = connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())
    finally:
        connection.close()


def stream(url: str, pid: int, payload: object) -> tuple[http.client.HTTPConnection, Any]:
    """Return a stream that one of the processes has begun to answer."""
    return stream_on(through(url, pid), payload)


def stream_on(
    connection: http.client.HTTPConnection, payload: object
) -> tuple[http.client.HTTPConnection, Any]:
    """Return a stream that has begun, on an open connection."""
    connection.request(
        "POST", "/invocations", json.dumps(payload).encode(), {"Content-Type": "application/json"}
    )
    return connection, connection.getresponse()


def counted(url: str, name: str, **labels: str) -> float:
    """Return the sum of the series with these labels."""
    total = 0.0
    for line in call(url, "/metrics").body.decode().splitlines():
        if line.startswith((name + "{", name + " ")) and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rsplit(" ", 1)[1])
    return total


def test_both_answer_with_the_same_bytes(two: RunningServer) -> None:
    """Every lane, streamed or not; and what only the first process knows, through either."""
    pids = front_ends(two.process)
    assert len(pids) == 2
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    for path, payload in (
        ("/invocations", SHORT),
        ("/invocations", {**SHORT, "stream": True}),
        ("/predictions/model", SHORT),
        ("/invocations", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}),
        ("/invocations", {"inputs": 5}),
        ("/tokenize", {"prompt": PROMPT}),
    ):
        first, second = (ask(two.url, pid, path, payload) for pid in pids)
        assert first.status == second.status
        assert stable(first.body) == stable(second.body), (path, payload)
        assert {*first.headers} == {*second.headers}
    first, second = (ask(two.url, pid, "/v1/chat/completions", chat) for pid in pids)
    contents = [one.json()["choices"][0]["message"]["content"] for one in (first, second)]
    assert contents[0] == contents[1]
    for path in ("/ping", "/v1/models", "/adapters", "/models/model", "/nowhere", "/openapi.json"):
        first, second = (ask(two.url, pid, path) for pid in pids)
        assert first.status == second.status, path
        assert stable(first.body) == stable(second.body), path
        assert {*first.headers} == {*second.headers}, path


def stable(body: bytes) -> object:
    """Return what is the same each time an answer is given."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    unstable = ("id", "created", "requestId", "memoryUsage", "lastRequestTime")
    if isinstance(document, dict):
        return {
            key: "" if key in ("data", "workers", "models") else value
            for key, value in document.items()
            if key not in unstable
        }
    return "" if isinstance(document, list) else document


def test_adapter_changes_reach_both_front_ends_at_once(two: RunningServer) -> None:
    """Registered through one, asked through the other the moment the call returns; many times."""
    pids = front_ends(two.process)
    base = ask(two.url, pids[0], "/invocations", SHORT).json()["generated_text"]
    wanted = ask(two.url, pids[0], "/invocations", {**SHORT, "adapters": "json"}).json()
    for turn in range(6):
        there, other = pids[turn % 2], pids[1 - turn % 2]
        body = {"name": "mine", "src": str(ADAPTERS / "json"), "preload": bool(turn % 3)}
        assert ask(two.url, there, "/adapters", body).status == 200
        for pid in (other, there):
            answer = ask(two.url, pid, "/invocations", {**SHORT, "adapters": "mine"})
            assert answer.json()["generated_text"] == wanted["generated_text"] != base
        assert ask(two.url, other, "/adapters/mine", method="DELETE").status == 200
        for pid in pids:
            refused = ask(two.url, pid, "/invocations", {**SHORT, "adapters": "mine"})
            assert refused.status == 424, refused.body
            assert b"was not found" in refused.body


def test_a_running_request_keeps_its_adapter(two: RunningServer) -> None:
    """Unregistered through one process while the other streams: the stream ends as it began."""
    pids = front_ends(two.process)
    body = {"name": "held", "src": str(ADAPTERS / "json")}
    assert ask(two.url, pids[0], "/adapters", body).status == 200
    payload = {
        **LONG,
        "adapters": "held",
        "parameters": {"max_new_tokens": 200, "ignore_eos_token": True},
    }
    alone = ask(two.url, pids[1], "/invocations", payload)
    connection, response = stream(two.url, pids[1], payload)
    first = response.read(1)
    assert ask(two.url, pids[0], "/adapters/held", method="DELETE").status == 200
    assert first + response.read() == alone.body
    connection.close()
    assert ask(two.url, pids[1], "/invocations", payload).status == 424


def test_answers_never_cross_between_processes(two: RunningServer) -> None:
    """Two adapters, the base and one that comes and goes, through both processes at once."""
    pids = front_ends(two.process)
    names = ("", "json", "capitals")
    wanted = {
        name: ask(two.url, pids[0], "/invocations", {**SHORT, "adapters": name}).json()
        for name in names
    }
    stopping = threading.Event()

    def change() -> None:
        while not stopping.is_set():
            body = {"name": "coming", "src": str(ADAPTERS / "capitals")}
            assert call(two.url, "/adapters", body).status == 200
            assert call(two.url, "/adapters/coming", method="DELETE").status == 200

    def use(index: int) -> int:
        name, pid = names[index % 3], pids[index % 2]
        answer = ask(two.url, pid, "/invocations", {**SHORT, "adapters": name})
        assert answer.json() == wanted[name], (name, answer.body)
        return 1

    with ThreadPoolExecutor(4) as pool:
        changing = pool.submit(change)
        assert sum(pool.map(use, range(60))) == 60
        stopping.set()
        changing.result()


def test_the_queue_is_one(two: RunningServer) -> None:
    """So many requests as job_queue_size are admitted by both together, and no more."""
    pids = front_ends(two.process)
    # On a busy machine the streams could end while a connection of one process is looked for.
    for_streams = [through(two.url, pids[index % 2]) for index in range(LIMIT)]
    for_others = [(through(two.url, pid), through(two.url, pid)) for pid in pids]
    open_streams = [stream_on(connection, LONG) for connection in for_streams]
    assert [response.status for _, response in open_streams] == [200] * LIMIT
    for one, other in for_others:
        refused = ask_on(one, "/invocations", SHORT)
        assert refused.status == 503
        assert b"queue capacity exceeded" in refused.body
        assert ask_on(other, "/ping").status == 200
    assert counted(two.url, "lmi_requests_in_flight") == LIMIT
    for connection, _ in open_streams:
        connection.close()
    assert wait_until(lambda: counted(two.url, "lmi_requests_in_flight") == 0, 10)
    assert all(ask(two.url, pid, "/invocations", SHORT).status == 200 for pid in pids)


def test_metrics_are_those_of_both(two: RunningServer) -> None:
    """What either process answered is counted once, in the metrics of both; tokens as well."""
    pids = front_ends(two.process)
    labels = {"route": "/predictions/{model}", "status": "200"}
    before = counted(two.url, "lmi_requests_total", **labels)
    tokens = counted(two.url, "vllm:generation_tokens_total")
    for pid in pids * 3:
        assert ask(two.url, pid, "/predictions/model", SHORT).status == 200
    for pid in pids:
        text = ask(two.url, pid, "/metrics").body.decode()
        assert "process_resident_memory_bytes" in text
        assert 'lmi_state{state="Healthy"} 1.0' in text
        assert 'lmi_startup_step_seconds{step="front ends"}' in text  # and no part of the warm-up
    assert counted(two.url, "lmi_requests_total", **labels) == before + 6
    assert counted(two.url, "vllm:generation_tokens_total") == tokens + 6 * 8


def test_sessions_deferred_answers_and_levels_are_shared(two: RunningServer) -> None:
    """Begun through one process, gone on with through the other."""
    one, other = front_ends(two.process)
    begun = ask(two.url, other, "/invocations", {"requestType": "NEW_SESSION"})
    name = begun.headers["x-amzn-sagemaker-session-id"].partition(";")[0]
    with_session = {"X-Amzn-SageMaker-Session-Id": name}
    assert ask(two.url, one, "/invocations", SHORT, headers=with_session).status == 200
    closed = ask(two.url, one, "/invocations", {"requestType": "CLOSE"}, headers=with_session)
    assert closed.status == 200
    assert ask(two.url, other, "/invocations", SHORT, headers=with_session).status == 424
    later = ask(two.url, other, "/invocations", SHORT, headers={"x-synchronous": "false"})
    token = {"x-starting-token": later.headers["x-next-token"]}

    def is_done() -> bool:
        answer = ask(two.url, one, "/invocations", SHORT, headers=token)
        return b"generated_text" in answer.body

    assert wait_until(is_done, 20)
    assert ask(two.url, other, "/server/logging?level=debug", method="POST").status == 200
    ask(two.url, other, "/invocations", SHORT)
    assert ask(two.url, one, "/server/logging?level=info", method="POST").status == 200


def test_pause_of_the_whole_server_ends_nothing(two: RunningServer) -> None:
    """`docker pause` stops every process: none of them hangs, and streams go on."""
    pids = front_ends(two.process)
    opened = [stream(two.url, pid, LONG) for pid in pids]
    stopped = [psutil.Process(two.process.process.pid), *two.process.children()]
    for process in stopped:
        process.suspend()
    time.sleep(LIVENESS_SECONDS + 2)
    for process in stopped:
        process.resume()
    for connection, response in opened:
        assert b"generated_text" in response.read()
        connection.close()
    assert front_ends(two.process) == pids
    assert "hangs" not in two.process.stderr


def test_process_that_dies_is_replaced(two: RunningServer) -> None:
    """The first goes on answering; its place is taken, and nothing that was counted is lost."""
    first, second = front_ends(two.process)
    ask(two.url, second, "/predictions/model", SHORT)
    labels = {"route": "/predictions/{model}", "status": "200"}
    before = counted(two.url, "lmi_requests_total", **labels)
    body = {"name": "orphan", "src": str(ADAPTERS / "json")}
    assert ask(two.url, first, "/adapters", body).status == 200
    open_streams = [
        stream(two.url, second, {**LONG, "adapters": "orphan" if index % 2 else ""})
        for index in range(4)
    ]
    assert all(response.status == 200 for _, response in open_streams)
    os.kill(second, signal.SIGKILL)
    # Its requests are no one's: their adapter can go at once, and the engine is free.
    assert ask(two.url, first, "/adapters/orphan", method="DELETE").status == 200
    assert wait_until(lambda: running_requests(two.url) == 0, 5)
    assert ask(two.url, first, "/invocations", SHORT).status == 200
    for connection, _ in open_streams:
        connection.close()
    assert wait_until(lambda: len(front_ends(two.process)) == 2, 10)
    (third,) = {*front_ends(two.process)} - {first, second}
    assert wait_until(lambda: is_listening(third), 60), two.process.describe()
    body = {"name": "after", "src": str(ADAPTERS / "json")}
    assert ask(two.url, third, "/adapters", body).status == 200
    answer = ask(two.url, third, "/invocations", {**SHORT, "adapters": "after"})
    assert answer.status == 200
    assert ask(two.url, third, "/adapters/after", method="DELETE").status == 200
    assert counted(two.url, "lmi_requests_total", **labels) == before
    assert wait_until(lambda: counted(two.url, "lmi_requests_in_flight") == 0, 20)


def is_listening(pid: int) -> bool:
    """Whether the process listens at a TCP port."""
    connections = psutil.Process(pid).net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN for one in connections)


def test_a_port_is_never_shared_with_another_server(
    two: RunningServer, server_process: StartServer
) -> None:
    """The port can be opened twice, but only by one server: the second says it is taken."""
    environ = {"LMI_FRONTEND_PROCESSES": "2"}
    port = two.url.rsplit(":", 1)[1]
    second = server_process("--demo", "--port", port, environ=environ)
    assert second.wait_exit() == 1
    assert f"cannot listen on http://127.0.0.1:{port}" in second.stderr.splitlines()[-1]
    assert call(two.url, "/ping").status == 200


def test_a_drain_lets_both_finish(two: RunningServer) -> None:
    """SIGTERM: streams of both processes end whole, new work is refused by both, exit 0.

    The last test of the module: it ends the server.
    """
    pids = front_ends(two.process)
    some = {**LONG, "parameters": {**LONG["parameters"], "max_new_tokens": 600}}
    open_streams = [stream(two.url, pid, some) for pid in pids]
    assert all(response.status == 200 for _, response in open_streams)
    before = counted(two.url, "lmi_requests_total", route="/invocations", status="200")
    two.process.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: call(two.url, "/ping").status == 503, 5)
    for pid in pids:
        refused = ask(two.url, pid, "/invocations", SHORT)
        assert refused.status == 503, refused.body
        assert b"draining" in refused.body
    for connection, response in open_streams:
        assert b"generated_text" in response.read().splitlines()[-1]
        connection.close()
    assert two.process.wait_exit(20) == 0
    # The last line counts those of both.
    (answered,) = re.findall(r"ended: (\d+) requests answered", two.process.stderr)
    assert int(answered) >= before + len(open_streams)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def kill_others(server: ServerProcess, times: int) -> None:
    """Kill the process beside the first, and each that takes its place."""
    for _ in range(times):
        assert wait_until(lambda: len(front_ends(server)) == 2, 60)  # an engine may end before
        (other,) = front_ends(server)[1:]
        os.kill(other, signal.SIGKILL)
        assert wait_until(lambda gone=other: gone not in front_ends(server), 10)  # type: ignore[misc]


def last_code(opened: tuple[http.client.HTTPConnection, http.client.HTTPResponse]) -> int:
    """Return the code in the last row of a stream, which is an error."""
    connection, response = opened
    with contextlib.closing(connection):
        return int(json.loads(response.read().splitlines()[-1])["code"])


def test_the_death_of_the_engine_reaches_both(server_process: StartServer) -> None:
    """Only the parent sees an engine end, but clients of the other process get an error, too."""
    environ = {"LMI_FRONTEND_PROCESSES": "2", "SERVING_RETRY_THRESHOLD": "2"}
    server = server_process("--demo", "--port", "0", environ=environ)
    url = server.url_when_ready()
    pids = front_ends(server)
    open_streams = [stream(url, pid, LONG) for pid in pids]
    (engine,) = [
        child
        for child in psutil.Process(server.process.pid).children()
        if not is_of_the_front(child)
    ]
    engine.kill()
    assert [*map(last_code, open_streams)] == [500, 500]
    # The ports stay open: requests meanwhile are answered, by either process.
    deadline = time.monotonic() + 90
    while call(url, "/ping").status != 200:
        assert time.monotonic() < deadline, server.describe()
        for pid in pids:
            assert ask(url, pid, "/invocations", SHORT).status in (200, 500, 503)
    assert front_ends(server) == pids
    for pid in pids:
        assert ask(url, pid, "/invocations", SHORT).status == 200
        adapted = ask(url, pid, "/invocations", {**SHORT, "adapters": "json"})
        assert adapted.status == 200, adapted.body
    # One that hangs is ended as well: the kernel would go on giving it connections.
    os.kill(pids[1], signal.SIGSTOP)
    assert wait_until(lambda: pids[1] not in front_ends(server), 2 * LIVENESS_SECONDS)
    kill_others(server, SPARE_CLIENTS)
    # One more than there are slots for is a failure as the engine's death: the second of two.
    reason = "more front-end processes ended than can be replaced over one engine"
    assert wait_until(lambda: f"{reason}: restarting" in server.stderr, 10)
    assert wait_until(lambda: call(url, "/ping").status == 200, 60), server.describe()
    for pid in front_ends(server):
        assert ask(url, pid, "/invocations", SHORT).status == 200
    opened = stream(url, server.process.pid, LONG)
    kill_others(server, 1 + SPARE_CLIENTS)
    assert last_code(opened) == 500
    assert server.wait_exit(30) == 1
    assert server.stderr.splitlines()[-1] == f"lmi-vllm: error: {reason}"


def test_front_ends_end_with_the_first_process(server_process: StartServer) -> None:
    """Killed while the others still import vLLM: they go, too."""
    environ = {"LMI_FRONTEND_PROCESSES": "3"}
    server = server_process("--demo", "--port", "0", environ=environ)
    assert wait_until(lambda: len(front_ends(server)) == 3, 60)
    others = front_ends(server)[1:]
    server.process.kill()
    server.wait_exit()
    assert wait_until(lambda: not any(psutil.pid_exists(pid) for pid in others), 10)


def test_code_of_the_users_is_refused(server_process: StartServer, tmp_path: Path) -> None:
    """Its state would be in several processes: the start says what to set instead."""
    (tmp_path / "model.py").write_text("def handle(inputs):\n    return None\n")
    (tmp_path / "serving.properties").write_text(f"option.model_id={DEMO_MODEL_DIR}\n")
    environ = {"LMI_FRONTEND_PROCESSES": "2"}
    server = server_process("--model-store", str(tmp_path), "--port", "0", environ=environ)
    assert server.wait_exit(30) == 1
    assert "set LMI_FRONTEND_PROCESSES=1, or LMI_CUSTOM_CODE=none" in server.stderr
