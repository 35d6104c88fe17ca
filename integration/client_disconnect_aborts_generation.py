"""A client that goes away frees its sequence in the engine within a second, on every route.

Run against our own process on the real engine: aiohttp leaves handler cancellation off there by
default, and on in its test server.
"""

import pytest

from integration.client import OpenStream, call, running_requests, send, wait_until
from integration.conftest import RunningServer

LONG = 1500
PROMPT = "Once upon a time"
LMI = {"inputs": PROMPT, "parameters": {"max_new_tokens": LONG, "ignore_eos_token": True}}
COMPLETION = {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": LONG,
    "ignore_eos": True,
}
RESPONSE = {"input": PROMPT, "max_output_tokens": LONG, "ignore_eos": True}
ROUTES = [
    pytest.param("/invocations", LMI, id="lmi"),
    pytest.param("/predictions/model", LMI, id="predictions"),
    pytest.param("/invocations", COMPLETION, id="completion-on-invocations"),
    pytest.param("/v1/completions", COMPLETION, id="completions"),
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/responses", RESPONSE, id="responses"),
]


@pytest.mark.vllm
@pytest.mark.parametrize(("path", "payload"), ROUTES)
def test_streaming_client_gone_frees_the_request(
    demo_server: RunningServer, path: str, payload: dict[str, object]
) -> None:
    """Closing the connection in mid-stream aborts the generation."""
    url = demo_server.url
    connection = OpenStream(url, path, payload | {"stream": True})
    assert wait_until(lambda: running_requests(url) == 1, 5)
    connection.drop()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.vllm
@pytest.mark.parametrize(("path", "payload"), ROUTES)
def test_waiting_client_gone_frees_the_request(
    demo_server: RunningServer, path: str, payload: dict[str, object]
) -> None:
    """Closing the connection while waiting for the whole answer aborts the generation."""
    url = demo_server.url
    connection = send(url, path, payload)
    assert wait_until(lambda: running_requests(url) == 1, 5)
    connection.close()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.vllm
def test_64_clients_gone_at_once_free_all_requests(demo_server: RunningServer) -> None:
    """64 streams run together; when all clients go, nothing is left, and the server answers."""
    url = demo_server.url
    connections = [OpenStream(url, "/invocations", LMI | {"stream": True}) for _ in range(64)]
    for connection in connections:
        connection.drop()
    assert wait_until(lambda: running_requests(url) == 0, 3)
    assert call(url, "/invocations", {"inputs": PROMPT}).status == 200
