"""Both lanes over real HTTP and the real engine: framings, lists, adapters, client faults."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
PROMPT = "The capital of France is"


def test_stream_has_one_row_per_token_and_ends_with_the_text(demo_server: RunningServer) -> None:
    """A jsonlines stream adds up to the whole answer and says so in its last row."""
    payload = {"inputs": PROMPT, "parameters": {"details": True}}
    whole = call(demo_server.url, "/invocations", payload).json()
    streamed = call(demo_server.url, "/invocations", payload | {"stream": True})
    assert streamed.headers["content-type"] == "application/jsonlines"
    assert streamed.headers["transfer-encoding"] == "chunked"
    rows = streamed.lines()
    assert rows[-1]["generated_text"] == whole["generated_text"]
    assert "".join(row["token"]["text"] for row in rows) == whole["generated_text"]
    assert len(rows) == rows[-1]["details"]["generated_tokens"]
    assert rows[-1]["details"]["generated_tokens"] == whole["details"]["generated_tokens"]
    assert all("generated_text" not in row for row in rows[:-1])
    assert all(row["token"]["log_prob"] == row["token"]["logprob"] <= 0 for row in rows)


def test_accept_shapes_the_stream_as_sse(demo_server: RunningServer) -> None:
    """Accept: text/event-stream frames each row as an SSE event; LMI's SSE has no [DONE]."""
    answer = call(
        demo_server.url,
        "/invocations",
        {"inputs": PROMPT, "stream": True},
        headers={"Accept": "text/event-stream"},
    )
    assert answer.headers["content-type"] == "text/event-stream"
    events = answer.body.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: {") for event in events)
    assert "generated_text" in json.loads(events[-1].removeprefix("data: "))


def test_both_lanes_give_the_same_greedy_text(demo_server: RunningServer) -> None:
    """`inputs` and `prompt` with the same greedy settings answer with the same text."""
    lmi = call(demo_server.url, "/invocations", {"inputs": PROMPT}).json()["generated_text"]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30}
    on_invocations = call(demo_server.url, "/invocations", body)
    on_v1 = call(demo_server.url, "/v1/completions", body)
    assert on_invocations.json()["choices"][0]["text"] == lmi
    assert on_v1.json()["choices"][0]["text"] == lmi
    assert on_invocations.body.endswith(b"\n")
    assert not on_v1.body.endswith(b"\n")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_answers_never_repeat_the_prompt(demo_server: RunningServer, is_streamed: bool) -> None:
    """A prompt that ends with U+FFFD, or inside a character, on both lanes and of a chat."""
    words = "The word is kumquat. It is \N{REPLACEMENT CHARACTER}"
    snowman = {"prompt": words[:-1] + "\N{SNOWMAN}"}
    ids = call(demo_server.url, "/tokenize", snowman).json()["tokens"]
    stop = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, "stop": ["kumquat"]}
    parameters = {"max_new_tokens": 9, "stop": ["kumquat"], "ignore_eos_token": True}
    chat = {
        "messages": [
            {"role": "system", "content": "The word is kumquat."},
            {"role": "assistant", "content": words[-8:]},
        ],
        "add_generation_prompt": False, "continue_final_message": True, **stop,
    }  # fmt: skip
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/invocations", {"inputs": words, "parameters": parameters}),
        ("/invocations", {"inputs": words, "parameters": {**parameters, "truncate": 2}}),
        ("/invocations", chat),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": words, **stop}),
        ("/v1/completions", {"prompt": ids[:-1], **stop}),
    ]
    for path, body in asked:
        answer = call(demo_server.url, path, {**body, "stream": is_streamed})
        assert answer.status == 200
        assert b"The word" not in answer.body
        assert b"kumquat" not in answer.body
        if path != "/invocations":
            assert b'"finish_reason":"length"' in answer.body


def test_chat_stream_is_sse_on_v1_and_jsonlines_on_invocations(
    demo_server: RunningServer,
) -> None:
    """The same chat stream comes as vLLM's SSE on /v1 and as bare JSON lines on /invocations."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "stream": True,
    }
    v1 = call(demo_server.url, "/v1/chat/completions", body)
    assert v1.headers["content-type"].startswith("text/event-stream")
    assert v1.body.endswith(b"data: [DONE]\n\n")
    lines = call(demo_server.url, "/invocations", body)
    assert lines.headers["content-type"] == "application/jsonlines"
    events = [event for event in v1.body.decode().split("\n\n") if event][:-1]
    spoken = [json.loads(event.removeprefix("data: ")) for event in events]
    assert said(lines.lines()) == said(spoken) == "The capital of France is Paris."


def said(rows: list[dict[str, Any]]) -> str:
    """Return the text of a chat stream; how many tokens a row carries depends on the load."""
    return "".join(row["choices"][0]["delta"].get("content") or "" for row in rows)


def test_list_inputs_answer_in_order_with_one_adapter_each(demo_server: RunningServer) -> None:
    """A list of prompts with a list of adapters gives one result each, in order."""
    single = [
        call(demo_server.url, "/invocations", {"inputs": PROMPT, "adapters": name}).json()
        for name in ("", "capitals", "json")
    ]
    payload = {"inputs": [PROMPT] * 3, "adapters": ["", "capitals", "json"]}
    together = call(demo_server.url, "/invocations", payload).json()
    assert together == single
    assert len({item["generated_text"] for item in together}) == 3


def test_64_streams_at_once_all_end_whole(demo_server: RunningServer) -> None:
    """64 concurrent streams each end with their own complete text."""
    payload = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 20}}
    expected = call(demo_server.url, "/invocations", payload).body

    def stream(_: int) -> bytes:
        return call(demo_server.url, "/invocations", payload, seconds=120).body

    with ThreadPoolExecutor(64) as pool:
        bodies = list(pool.map(stream, range(64)))
    texts = {json.loads(body.splitlines()[-1])["generated_text"] for body in bodies}
    assert texts == {json.loads(expected.splitlines()[-1])["generated_text"]}


@pytest.mark.parametrize(
    ("payload", "status", "text"),
    [
        ({"inputs": PROMPT, "adapters": "nobody"}, 424, "nobody"),
        ({"inputs": "moon " * 3000}, 424, "context length"),
        ({"inputs": PROMPT, "parameters": {"max_new_tokens": 99999}}, 424, "max_new_tokens"),
        ({"inputs": PROMPT, "parameters": {"temperature": -1}}, 424, "temperature"),
        ({"prompt": PROMPT, "model": "nobody"}, 424, "does not exist"),
        ({"something": 1}, 424, "must contain prompt, inputs, or messages"),
        (b"{not json", 424, "JSON"),
    ],
    ids=["adapter", "long-prompt", "max-new-tokens", "temperature", "model", "keys", "json"],
)
def test_client_errors_are_424_and_the_server_keeps_serving(
    demo_server: RunningServer, payload: object, status: int, text: str
) -> None:
    """What a payload causes is 424 with the reason, and the next request is answered."""
    answer = call(demo_server.url, "/invocations", payload)
    assert answer.status == status
    assert text in answer.json()["error"]
    assert "connection" not in answer.headers  # the request was read whole
    assert call(demo_server.url, "/invocations", {"inputs": PROMPT}).status == 200
