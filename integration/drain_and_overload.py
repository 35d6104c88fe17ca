"""SIGTERM drains, a second one hurries; the queue is bounded.

On the scripted engine: the engine is not what is proven here.
"""

import json
import signal
import threading
import time

from integration.client import Answer, OpenStream, call, wait_until
from integration.conftest import RunningServer, StartServer

SLOW = {"inputs": "one two three", "parameters": {"max_new_tokens": 20}, "stream": True}


def test_running_work_finishes_and_new_work_is_refused(scripted_server: RunningServer) -> None:
    """After SIGTERM: ping and new work 503, the running stream ends whole, exit 0."""
    server, url = scripted_server.process, scripted_server.url
    answers: list[Answer] = []
    worker = threading.Thread(target=lambda: answers.append(call(url, "/invocations", SLOW)))
    worker.start()
    assert wait_until(lambda: b'"requestInQueue":1' in call(url, "/models/model").body, 5)
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: call(url, "/ping").status == 503, 2)
    assert call(url, "/ping").json() == {"model": {"status": "DRAINING"}}
    refused = call(url, "/invocations", SLOW)
    assert refused.status == 503
    assert refused.headers["connection"] == "close"
    assert int(refused.headers["retry-after"]) > 0
    worker.join(20)
    assert "generated_text" in json.loads(answers[0].body.splitlines()[-1])
    assert server.wait_exit(10) == 0


def test_second_signal_ends_at_once(scripted_server: RunningServer) -> None:
    """Two SIGTERMs: the process does not wait for the running stream."""
    server, url = scripted_server.process, scripted_server.url
    long = SLOW | {"parameters": {"max_new_tokens": 200}}
    client = OpenStream(url, "/invocations", long)
    server.process.send_signal(signal.SIGTERM)
    assert wait_until(lambda: call(url, "/ping").status == 503, 2)
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.wait_exit(10) == 0
    assert time.monotonic() - began < 8  # the stream alone would take 20 s
    client.drop()


def test_drain_deadline_ends_unfinished_requests(server_process: StartServer) -> None:
    """SERVING_SHUTDOWN_TIMEOUT bounds the drain; the stream ends with an error row."""
    server = server_process(
        "--demo", "--port", "0", "--engine", "scripted",
        environ={"LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.1", "SERVING_SHUTDOWN_TIMEOUT": "1"},
    )  # fmt: skip
    url = server.url_when_ready(20)
    long = SLOW | {"parameters": {"max_new_tokens": 500}}
    client = OpenStream(url, "/invocations", long)
    server.process.send_signal(signal.SIGTERM)
    assert json.loads(client.rest().splitlines()[-1])["error"]
    assert server.wait_exit(15) == 0


def test_request_past_the_queue_limit_is_refused(server_process: StartServer) -> None:
    """With job_queue_size=1, of two requests at once exactly one is answered."""
    server = server_process(
        "--demo", "--port", "0", "--engine", "scripted",
        environ={"LMI_SCRIPTED_SECONDS_PER_TOKEN": "0.1", "MAX_CONCURRENT_REQUESTS": "1"},
    )  # fmt: skip
    url = server.url_when_ready(20)
    client = OpenStream(url, "/invocations", SLOW)
    refused = call(url, "/invocations", SLOW)
    assert refused.status == 503
    assert refused.json()["type"] == "WlmCapacityException"
    assert refused.json()["message"] == "Worker queue capacity exceeded for model: model"
    assert "retry-after" in refused.headers
    assert json.loads(client.rest().splitlines()[-1])["generated_text"]
    assert wait_until(lambda: call(url, "/invocations", SLOW).status == 200, 5)
