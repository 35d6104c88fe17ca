"""The engine dies or stalls: clients are told, health says so, and it comes back as configured."""

import json
import os
import re
import resource
import signal
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from integration.client import OpenStream, call, wait_until
from integration.conftest import ServerProcess, StartServer
from lmi_vllm.demo import DEMO_MODEL_DIR

pytestmark = pytest.mark.vllm
RESTART_SECONDS = 90.0
LASTS = "10"  # the first stall has to end before that, on a busy machine, too
ENGINE_KILLED = "lmi-vllm: error: the engine process died: killed by SIGKILL"
IDLE_SECONDS = 8.0  # two probes of 3 s
PROMPT = "The capital of France is"
LONG: Mapping[str, Any] = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1800, "ignore_eos_token": True},
}


def start(server_process: StartServer, **environ: str) -> tuple[ServerProcess, str]:
    """Return a ready server on the embedded model and its URL."""
    server = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
    return server, server.url_when_ready()


def ping(url: str) -> tuple[int, dict[str, Any]]:
    """Return the status of /ping and the entry of its one model."""
    answer = call(url, "/ping")
    (entry,) = json.loads(answer.body).values()
    return answer.status, entry


def is_back(server: ServerProcess, url: str) -> bool:
    """Return whether the server is healthy in time; an ended one never is."""

    def ended_or_healthy() -> bool:
        return server.process.poll() is not None or ping(url)[0] == 200

    try:
        return wait_until(ended_or_healthy, RESTART_SECONDS) and server.process.poll() is None
    except ConnectionError:
        server.wait_exit(10)  # what it said last is part of the report
        return False


def engine_of(server: ServerProcess) -> psutil.Process:
    """Return the engine's process."""
    (engine,) = server.children()
    return engine


def answers(url: str, adapters: tuple[str | None, ...]) -> list[str]:
    """Return what the base model and each adapter say."""
    payload = {"inputs": PROMPT, "parameters": {"max_new_tokens": 12}}
    found = []
    for name in adapters:
        answer = call(url, "/invocations", payload | ({"adapters": name} if name else {}))
        assert answer.status == 200, answer.body
        found.append(json.loads(answer.body)["generated_text"])
    return found


def test_engine_comes_back_with_its_adapters(server_process: StartServer) -> None:
    """Within retry_threshold: clients get their error, all adapters return, then traffic."""
    server, url = start(server_process, SERVING_RETRY_THRESHOLD="1")
    source = DEMO_MODEL_DIR / "adapters" / "json"
    assert call(url, "/adapters", {"name": "added", "src": str(source), "pin": True}).status == 200
    names = (None, "capitals", "json", "added")
    before = answers(url, names)
    assert before[2] == before[3] != before[0]
    stream = OpenStream(url, "/invocations", {**LONG, "stream": True})
    engine = engine_of(server)
    engine.kill()
    assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
    assert wait_until(lambda: ping(url)[0] == 503, 10)
    status, entry = ping(url)
    assert (status, entry["status"]) == (503, "PENDING")
    assert entry["phase"] in ("engine", "adapters", "warm-up")
    refused = call(url, "/invocations", {"inputs": "a"})
    assert refused.status == 503
    assert "retry-after" in refused.headers
    assert is_back(server, url), server.describe()
    assert answers(url, names) == before
    assert engine_of(server).pid != engine.pid
    engine_of(server).kill()
    assert server.wait_exit(20) == 1
    assert server.stderr.splitlines()[-1] == ENGINE_KILLED


def test_engine_that_dies_while_it_comes_back_counts(server_process: StartServer) -> None:
    """A restart that fails is a failure as well; the threshold ends both."""
    server, url = start(server_process, SERVING_RETRY_THRESHOLD="2")
    first = engine_of(server)
    first.kill()
    assert wait_until(
        lambda: any(child.pid != first.pid for child in server.children()), RESTART_SECONDS
    )
    for child in server.children():
        child.kill()
    assert is_back(server, url), server.describe()
    answers(url, (None, "json"))
    assert "failure 2, retry_threshold 2" in server.stderr


def test_fail_fast_ends_at_once_with_137(server_process: StartServer) -> None:
    """SERVING_FAIL_FAST: the process ends at once."""
    server, _ = start(server_process, SERVING_FAIL_FAST="true")
    engine_of(server).kill()
    assert server.wait_exit(10) == 137
    assert server.stderr.splitlines()[-1] == ENGINE_KILLED


def test_health_check_override_keeps_the_process(server_process: StartServer) -> None:
    """SERVING_HEALTH_CHECK_OVERRIDE: /ping stays 200 and says FAILED; requests are refused."""
    server, url = start(server_process, SERVING_HEALTH_CHECK_OVERRIDE="true")
    engine_of(server).kill()
    assert wait_until(lambda: ping(url)[1]["status"] == "FAILED", 30)
    assert ping(url)[0] == 200
    assert call(url, "/invocations", {"inputs": "a"}).status == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0


def test_stall_is_noticed_and_one_that_lasts_replaces_the_engine(
    server_process: StartServer,
) -> None:
    """One server: a stall that ends in time changes nothing, one that does not is a failure."""
    server, url = start(
        server_process, LMI_STALL_TIMEOUT="2", LMI_STALL_RESTART_TIMEOUT=LASTS,
        SERVING_RETRY_THRESHOLD="2",
    )  # fmt: skip
    engine = engine_of(server)
    see_a_stall_that_ends(engine, url)
    assert engine_of(server).pid == engine.pid
    assert "restarting the engine" not in server.stderr
    see_two_stalls_that_last(server, url)


def see_a_stall_that_ends(engine: psutil.Process, url: str) -> None:
    """An engine that is alive and gets nowhere is unhealthy until its next step."""
    stream = OpenStream(url, "/invocations", {**LONG, "stream": True})
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        assert wait_until(lambda: ping(url)[0] == 503, 9)
        assert ping(url)[1] == {"status": "Unhealthy"}
        refused = call(url, "/invocations", {"inputs": "a"})
        assert (refused.status, "no progress" in refused.body.decode()) == (503, True)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert wait_until(lambda: ping(url)[0] == 200, 30)
    assert "error" not in json.loads(stream.rest().splitlines()[-1])


def test_stall_without_requests_ends_with_a_probe_token(
    server_process: StartServer,
) -> None:
    """The stalled requests have timed out and new ones are refused, and yet health returns."""
    server, url = start(
        server_process, LMI_STALL_TIMEOUT="2", PREDICT_TIMEOUT="4", LMI_STALL_RESTART_TIMEOUT="0",
        LMI_IDLE_PROBE_INTERVAL="3",
    )  # fmt: skip
    engine = engine_of(server)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        answer = call(url, "/invocations", dict(LONG))
        assert (answer.status, "predict_timeout" in answer.body.decode()) == (500, True)
        assert ping(url)[1] == {"status": "Unhealthy"}
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert wait_until(lambda: ping(url)[0] == 200, 20)
    assert call(url, "/invocations", {"inputs": "a"}).status == 200

    see_an_idle_engine_that_hangs(engine, url)


def see_an_idle_engine_that_hangs(engine: psutil.Process, url: str) -> None:
    """No request comes, and yet health says so; what the server asks itself is not counted."""
    before = finished_requests(url)
    time.sleep(IDLE_SECONDS)
    assert finished_requests(url) == before
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        assert wait_until(lambda: ping(url)[0] == 503, 15)
        assert ping(url)[1] == {"status": "Unhealthy"}
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert wait_until(lambda: ping(url)[0] == 200, 20)


def finished_requests(url: str) -> float:
    """Return how many requests vLLM has counted."""
    text = call(url, "/metrics").body.decode()
    counts = re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, counts))


def see_two_stalls_that_last(server: ServerProcess, url: str) -> None:
    """Under a request and under an adapter: both are answered, and the engine is replaced."""
    first = engine_of(server)
    stream = OpenStream(url, "/invocations", {**LONG, "stream": True})
    os.kill(first.pid, signal.SIGSTOP)
    assert json.loads(stream.rest().splitlines()[-1])["code"] == 500
    assert wait_until(lambda: not psutil.pid_exists(first.pid), 20)
    assert is_back(server, url), server.describe()
    second = engine_of(server)
    os.kill(second.pid, signal.SIGSTOP)
    source = DEMO_MODEL_DIR / "adapters" / "json"
    answer = call(url, "/adapters", {"name": "added", "src": str(source)})
    assert answer.status >= 424, answer.body
    assert wait_until(lambda: not psutil.pid_exists(second.pid), 20)
    assert is_back(server, url), server.describe()
    assert call(url, "/invocations", {"inputs": "a"}).status == 200
    assert "LMI_STALL_RESTART_TIMEOUT" in server.stderr


def test_error_rate_makes_health_fail_permanently(server_process: StartServer) -> None:
    """Three answers of 424 in a minute: /ping 503 for good, the model goes on answering."""
    server = server_process(
        "--demo", "--port", "0", "--engine", "scripted",
        environ={"SERVING_ERROR_RATE_SERVER": "3/PT1M"},
    )  # fmt: skip
    url = server.url_when_ready(20)
    for _ in range(3):
        assert ping(url)[0] == 200
        assert call(url, "/predictions/nobody").status == 404  # counts for nothing
        assert call(url, "/invocations", {"inputs": 5}).status == 424
        assert call(url, "/v1/chat/completions", b"{bad").status == 400  # the same
    reason = "there were too many errors (SERVING_ERROR_RATE_SERVER=3/PT1M)"
    assert ping(url) == (503, {"status": "Healthy", "unhealthy": reason})
    assert call(url, "/invocations", {"inputs": "a"}).status == 200
    assert ping(url)[0] == 503


@pytest.mark.parametrize("left", [1, 12, 40])
def test_restart_without_open_files_has_a_reason(server_process: StartServer, left: int) -> None:
    """ZeroMQ aborted the server (SIGABRT) where it found some, but too few; no line said why."""
    server, _ = start(server_process, SERVING_RETRY_THRESHOLD="1")
    pid = server.process.pid
    most = psutil.Process(pid).num_fds() + left
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    engine_of(server).kill()
    assert server.wait_exit(60) == 1
    assert f"the engine is not started: of {most} files" in server.stderr.splitlines()[-1]
