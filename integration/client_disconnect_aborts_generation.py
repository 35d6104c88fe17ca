"""A client that disconnects frees its sequence in the engine within a second, on every route.

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
    pytest.param("/models/model/invoke", LMI, id="invoke"),
    pytest.param("/invocations", CHAT, id="chat-on-invocations"),
    pytest.param("/invocations", LMI | {"adapters": "json"}, id="adapter"),
    pytest.param("/invocations", COMPLETION, id="completion-on-invocations"),
    pytest.param("/v1/completions", COMPLETION, id="completions"),
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/responses", RESPONSE, id="responses"),
]

WHOLE = [
    pytest.param(
        "/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]]}, id="batch"
    ),
]


@pytest.mark.vllm
@pytest.mark.parametrize(("path", "payload"), ROUTES)
def test_streaming_disconnect_frees_the_request(
    demo_server: RunningServer, path: str, payload: dict[str, object]
) -> None:
    """Closing the connection in mid-stream aborts the generation."""
    url = demo_server.url
    connection = OpenStream(url, path, payload | {"stream": True})
    assert wait_until(lambda: running_requests(url) == 1, 5)
    connection.drop()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.vllm
@pytest.mark.parametrize(("path", "payload"), [*ROUTES, *WHOLE])
def test_waiting_disconnect_frees_the_request(
    demo_server: RunningServer, path: str, payload: dict[str, object]
) -> None:
    """Closing the connection while waiting for the whole answer aborts the generation."""
    url = demo_server.url
    connection = send(url, path, payload)
    assert wait_until(lambda: running_requests(url) == 1, 5)
    connection.close()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.vllm
def test_64_simultaneous_disconnects_free_all_requests(demo_server: RunningServer) -> None:
    """64 streams run together; when all clients go, nothing is left, and the server answers."""
    url = demo_server.url
    connections = [OpenStream(url, "/invocations", LMI | {"stream": True}) for _ in range(64)]
    for connection in connections:
        connection.drop()
    assert wait_until(lambda: running_requests(url) == 0, 3)
    assert call(url, "/invocations", {"inputs": PROMPT}).status == 200


SEVERAL = [
    pytest.param(LMI | {"inputs": [PROMPT] * 3}, 3, id="list"),
    pytest.param(
        {
            "inputs": PROMPT,
            "parameters": {**LMI["parameters"], "n": 3, "do_sample": True},  # type: ignore[dict-item]
        },
        1,  # vLLM counts the sequences of one request as it likes
        id="sequences",
    ),
]


@pytest.mark.vllm
@pytest.mark.parametrize(("payload", "least"), SEVERAL)
def test_disconnect_frees_all_sequences_of_the_request(
    demo_server: RunningServer, payload: dict[str, object], least: int
) -> None:
    """A request that is several in the engine leaves none of them behind."""
    url = demo_server.url
    connection = send(url, "/invocations", payload)
    try:
        assert wait_until(lambda: running_requests(url) >= least, 5)
    finally:
        connection.close()
    assert wait_until(lambda: running_requests(url) == 0, 1)


@pytest.mark.vllm
def test_disconnect_while_the_request_waits_for_the_engine(demo_server: RunningServer) -> None:
    """More requests than the batch takes: those still waiting are forgotten as well."""
    url = demo_server.url
    connections = [send(url, "/invocations", LMI) for _ in range(80)]  # the batch is 64
    assert wait_until(lambda: running_requests(url) == 80, 20)
    for connection in connections:
        connection.close()
    assert wait_until(lambda: running_requests(url) == 0, 3)


@pytest.mark.vllm
def test_disconnect_ends_beam_search(demo_server: RunningServer) -> None:
    """A search is many requests of one token, one step after the other: none follows."""
    url = demo_server.url
    parameters = {"max_new_tokens": 800, "num_beams": 3, "ignore_eos_token": True}
    connection = send(url, "/invocations", LMI | {"parameters": parameters})
    begun = series(url, "vllm:request_success_total")
    assert wait_until(lambda: series(url, "vllm:request_success_total") > begun + 6, 20)
    assert series(url, "lmi_requests_in_flight") == 1
    connection.close()
    assert wait_until(lambda: series(url, "lmi_requests_in_flight") == 0, 1)
    ended = series(url, "vllm:request_success_total")
    assert not wait_until(lambda: series(url, "vllm:request_success_total") > ended + 3, 1)


def series(url: str, name: str) -> float:
    """Return the sum of a series of /metrics."""
    lines = call(url, "/metrics").body.decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} "))
    )
