"""An idle model gives its memory back: its engine ends, and another answers the next request.

The real engine on a CPU, alone and with a second front-end process. vLLM's own levels need a GPU
(`python -m integration.gpu --only 'idle sleep'`).
"""

import concurrent.futures
import json
import signal

import psutil
import pytest

from integration.client import OpenStream, call, wait_until
from integration.conftest import ServerProcess, StartServer
from integration.engine_restart import answers, engine_of, ping, start

pytestmark = pytest.mark.vllm
ASLEEP_SECONDS = 60.0
NAMES = (None, "json", "capitals")
LONG = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 40}, "stream": True}


def fell_asleep(server: ServerProcess, url: str, engine: psutil.Process) -> bool:
    """Return whether the model sleeps in time, and its engine's process has ended."""
    assert wait_until(lambda: ping(url)[1]["status"] == "Asleep", ASLEEP_SECONDS), server.describe()
    return wait_until(lambda: not engine.is_running(), ASLEEP_SECONDS)


def test_idle_model_ends_its_engine_and_wakes_with_its_adapters(
    server_process: StartServer,
) -> None:
    """Each answer is as before, probes stay 200, and what only reads wakes nothing."""
    server, url = start(server_process, LMI_SLEEP_AFTER_SECONDS="3")
    before = answers(url, NAMES)
    for _ in range(2):
        assert fell_asleep(server, url, engine_of(server))
        for path in ("/ping", "/ready", "/health", "/live", "/v2/health/ready", "/metrics"):
            assert call(url, path).status == 200, path
        listed = call(url, "/v1/models").json()["data"]
        assert {card["id"] for card in listed} >= {"json", "capitals"}
        assert len(call(url, "/adapters").json()["adapters"]) == 2
        assert ping(url)[1]["status"] == "Asleep"
        assert answers(url, NAMES) == before
    text = call(url, "/metrics").body.decode()
    assert "lmi_wake_seconds_count 2.0" in text
    assert "lmi_engine_restarts_total 0.0" in text
    assert fell_asleep(server, url, engine_of(server))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(30) == 0


def test_requests_that_come_together_wake_it_once(server_process: StartServer) -> None:
    """Streams, lists, chat and texts to split: all of them wait for one engine."""
    server, url = start(server_process, LMI_SLEEP_AFTER_SECONDS="3")
    assert fell_asleep(server, url, engine_of(server))
    asked = {
        "/invocations": {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 4}},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
        "/v1/completions": {"prompt": "x", "max_tokens": 4, "stream": True},
        "/tokenize": {"prompt": "x"},
        "/v1/responses": {"input": "x", "max_output_tokens": 4},
    }
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        stream = pool.submit(OpenStream, url, "/invocations", LONG)
        found = {path: pool.submit(call, url, path, body) for path, body in asked.items()}
        assert {path: one.result().status for path, one in found.items()} == dict.fromkeys(
            asked, 200
        )
        assert b'"generated_text"' in stream.result().rest()
    assert "lmi_wake_seconds_count 1.0" in call(url, "/metrics").body.decode()


def test_processes_of_one_server_sleep_and_wake_together(server_process: StartServer) -> None:
    """Whichever of them a connection reaches."""
    server = server_process(
        "--demo", "--port", "0",
        environ={"LMI_SLEEP_AFTER_SECONDS": "4", "LMI_FRONTEND_PROCESSES": "2"},
    )  # fmt: skip
    url = server.url_when_ready()
    before = answers(url, NAMES)
    for _ in range(2):
        assert wait_until(lambda: ping(url)[1]["status"] == "Asleep", ASLEEP_SECONDS)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda _: answers(url, NAMES), range(8)))
        assert texts == [before] * 8
    assert json.loads(call(url, "/server/sleep").body)["wakes_on_request"] is False


@pytest.mark.parametrize("level", ["1", "2"])
def test_levels_of_vllm_are_refused_on_a_cpu(server_process: StartServer, level: str) -> None:
    """By name, with what is possible there; vLLM's worker would ignore them."""
    server = server_process("--demo", "--port", "0", environ={"LMI_SLEEP_LEVEL": level})
    assert server.wait_exit(60) == 1
    assert f"LMI_SLEEP_LEVEL={level}" in server.stderr
    assert "needs a GPU" in server.stderr
