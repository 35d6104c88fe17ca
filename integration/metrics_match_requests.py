"""On the real engine, our counters say what the answers say: on every lane, streamed or not."""

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.client import OpenStream, call, wait_until
from integration.conftest import RunningServer

PROMPT = "The capital of France is"


def tokens(url: str, adapter: str = "base") -> tuple[float, float]:
    """Return the tokens that went in and came out so far."""
    found = {"lmi_prompt_tokens_total": 0.0, "lmi_generated_tokens_total": 0.0}
    for family in text_string_to_metric_families(call(url, "/metrics").body.decode()):
        for sample in family.samples:
            if sample.name in found and sample.labels["adapter"] == adapter:
                found[sample.name] = sample.value
    prompt, generated = found.values()
    return prompt, generated


def more_tokens(url: str, path: str, body: dict[str, Any], adapter: str = "base") -> list[float]:
    """Return how many tokens one request added; it has to succeed."""
    before = tokens(url, adapter)
    answer = call(url, path, body)
    assert answer.status == 200, answer.body
    wait_until(lambda: tokens(url, adapter) != before, 5)
    return [after - earlier for after, earlier in zip(tokens(url, adapter), before, strict=True)]


def test_tokens_are_counted_equally_on_both_lanes(demo_server: RunningServer) -> None:
    """As `usage` counts them: whole and streamed, with `n`, lists and adapters."""
    url = demo_server.url
    completion = {"model": "lmi", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
    usage = json.loads(call(url, "/v1/completions", completion).body)["usage"]
    size = usage["prompt_tokens"]
    lmi = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6, "ignore_eos_token": True}}
    assert more_tokens(url, "/invocations", lmi) == [size, 6]
    assert more_tokens(url, "/invocations", lmi | {"stream": True}) == [size, 6]
    assert more_tokens(url, "/invocations", lmi | {"inputs": [PROMPT, PROMPT]}) == [2 * size, 12]
    assert more_tokens(url, "/v1/completions", completion | {"stream": True}) == [size, 6]
    several = completion | {"n": 2, "temperature": 1}
    assert more_tokens(url, "/v1/completions", several) == [size, 12]
    named = lmi | {"adapters": "capitals"}
    assert more_tokens(url, "/invocations", named, "capitals") == [size, 6]
    assert more_tokens(url, "/v1/completions", completion | {"model": "json"}, "json") == [size, 6]


def test_tokens_of_bridged_routes_are_counted(demo_server: RunningServer) -> None:
    """As their answers count them: whole, streamed, several conversations, an adapter's."""
    url = demo_server.url
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    message = {"model": "lmi", "max_tokens": 3, "messages": turn}
    size = call(url, "/v1/messages", message).json()["usage"]["input_tokens"]
    response = {"model": "lmi", "max_output_tokens": 3, "input": turn}
    other = call(url, "/v1/responses", response).json()["usage"]["input_tokens"]
    batch = message | {"messages": [turn, turn]}
    assert more_tokens(url, "/v1/messages", message) == [size, 3]
    assert more_tokens(url, "/v1/messages", message | {"stream": True}) == [size, 3]
    assert more_tokens(url, "/v1/messages", message | {"model": "json"}, "json") == [size, 3]
    assert more_tokens(url, "/v1/responses", response) == [other, 3]
    assert more_tokens(url, "/v1/responses", response | {"stream": True}) == [other, 3]
    assert more_tokens(url, "/v1/chat/completions/batch", batch) == [2 * size, 6]


LMI = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "ignore_eos_token": True}}
BATCH = {
    "messages": [[{"role": "user", "content": "x"}]],
    "model": "lmi",
    "max_tokens": 20,
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("path", "body"), [("/invocations", LMI), ("/v1/chat/completions/batch", BATCH)]
)
def test_times_add_up(demo_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    """Queue, then first token, then the others, all within the request's own time."""
    url, name = demo_server.url, f"times-add-up-{path.count('/')}"
    call(url, path, body, headers={"x-request-id": name})
    log = demo_server.process
    assert wait_until(lambda: name in log.stderr, 5)
    (line,) = [one for one in log.log if one.get("request_id") == name]
    names = ("queue_milliseconds", "first_token_milliseconds", "token_milliseconds")
    queue, first, each = (line[name] for name in names)
    whole = line["milliseconds"]
    assert 0 <= queue < first < whole
    assert 0 < 19 * each < whole  # the engine's clock against ours: no closer than this


def test_client_disconnect_is_counted_with_the_tokens_generated(
    demo_server: RunningServer,
) -> None:
    """499, a disconnect, and the tokens until the abort."""
    url = demo_server.url
    before = tokens(url)
    parameters = {"max_new_tokens": 2000, "ignore_eos_token": True}
    stream = OpenStream(
        url, "/invocations", {"inputs": "x", "parameters": parameters, "stream": True}
    )
    stream.drop()
    assert wait_until(lambda: tokens(url) != before, 10)
    assert 0 < tokens(url)[1] - before[1] < 2000
    text = call(url, "/metrics").body.decode()
    assert 'lmi_client_disconnects_total{dialect="lmi"}' in text
    assert 'adapter="base",dialect="lmi",route="/invocations",status="499"' in text
