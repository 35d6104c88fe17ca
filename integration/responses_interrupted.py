"""Streams of the Responses API that end early, as the real `openai` SDK reads them.

The engine is stopped (SIGSTOP) before the request, so that only what the API says at once comes.
"""

import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from integration.client import call, wait_until
from integration.conftest import ServerProcess, StartServer

pytestmark = pytest.mark.vllm
openai = pytest.importorskip("openai", reason="needs the openai SDK: make setup installs it")

# How a stream is cut -> the environment, what to do once it has begun, what the client is told.
Cut = tuple[dict[str, str], Callable[[ServerProcess, psutil.Process], None], str]
CUTS: dict[str, Cut] = {
    "deadline": (
        {"SERVING_CHUNKED_READ_TIMEOUT": "2"},
        lambda server, engine: None,
        "no answer within 2 s (chunked_read_timeout)",
    ),
    "shutdown": (
        {"SERVING_SHUTDOWN_TIMEOUT": "1"},
        lambda server, engine: server.process.send_signal(signal.SIGTERM),
        "shut",
    ),
    "engine death": ({}, lambda server, engine: engine.kill(), "Inference Engine Failure"),
}


@pytest.mark.parametrize(("environ", "act", "reason"), CUTS.values(), ids=CUTS)
def test_sdk_reads_the_end_of_a_stream_that_is_cut(
    server_process: StartServer,
    environ: dict[str, str],
    act: Callable[[ServerProcess, psutil.Process], None],
    reason: str,
) -> None:
    """`error` and then `response.failed`, typed and numbered; the SDK raises nothing."""
    server = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
    url = server.url_when_ready()
    (engine,) = server.children()
    engine.suspend()
    events: list[Any] = []
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
            for event in sdk.responses.create(model="lmi", input="Hello", stream=True):
                events.append(event)
                if event.type == "response.in_progress":
                    act(server, engine)
    finally:
        if engine.is_running():
            engine.resume()
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [event.sequence_number for event in events] == [0, 1, 2, 3]
    error, failed = events[2:]
    assert reason in error.message
    assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
    assert failed.response.error.message == error.message
    assert failed.response.id == events[0].response.id


def test_drain_waits_for_a_response_in_the_background(server_process: StartServer) -> None:
    """SIGTERM: it is read while it runs, ends whole, and has a line in the log before the exit."""
    environ = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    server = server_process("--demo", "--port", "0", environ=environ, is_forked=True)
    url = server.url_when_ready()
    (engine,) = server.children()
    engine.suspend()
    try:
        body = {"model": "lmi", "input": "Hello", "background": True, "max_output_tokens": 30}
        begun = call(url, "/v1/responses", body).json()
        assert begun["status"] == "queued"
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: call(url, "/ping").status == 503, 5)
        found = call(url, f"/v1/responses/{begun['id']}", method="GET").json()
        assert (found["id"], found["status"] in ("queued", "in_progress")) == (begun["id"], True)
        assert server.process.poll() is None
    finally:
        engine.resume()
    assert server.wait_exit(40) == 0
    (line,) = [line for line in server.log if line.get("deferred")]
    assert (line["status"], line["generated_tokens"] > 0) == (200, True)
