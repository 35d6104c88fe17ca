"""The `anthropic` SDK against our process: messages whole and streamed, tools, tokens, errors."""

import time
import urllib.request
from typing import Any

import pytest

from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
anthropic = pytest.importorskip(
    "anthropic", reason="needs the anthropic SDK: make setup installs it"
)
QUESTION: dict[str, Any] = {
    "model": "lmi",
    "max_tokens": 20,
    "extra_body": {"temperature": 0},  # which this API no longer has
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}
ANSWER = "The capital of France is Paris."
TOOL: dict[str, Any] = {
    "name": "look",
    "description": "Look somewhere.",
    "strict": True,  # else vLLM holds the model to the call's form, not to its schema
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["sea", "moon"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def sdk(demo_server: RunningServer) -> Any:
    """The SDK as its users make it."""
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        yield client


def test_sdk_reads_a_message(sdk: Any) -> None:
    """Its text, why it ended, and what it cost."""
    message = sdk.messages.create(**QUESTION)
    assert (message.type, message.role, message.model) == ("message", "assistant", "lmi")
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    counted = sdk.messages.count_tokens(model="lmi", messages=QUESTION["messages"])
    assert counted.input_tokens == message.usage.input_tokens


def test_sdk_reads_a_stream(sdk: Any) -> None:
    """The text in parts, and the same message at the end."""
    with sdk.messages.stream(**QUESTION) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().stop_reason == "end_turn"


def test_sdk_sends_an_agents_requests(sdk: Any) -> None:
    """A system prompt in blocks with cache marks, tools, thinking switched off, a tool's result."""
    messages = [
        *QUESTION["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "sea"}}
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "It is blue."},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral"}},
    ]
    message = sdk.messages.create(
        **{**QUESTION, "messages": messages}, system=system, thinking={"type": "disabled"}
    )
    assert message.stop_reason in ("end_turn", "max_tokens")


def test_adapter_answers_by_its_name(sdk: Any) -> None:
    """And its name is in the answer."""
    message = sdk.messages.create(**{**QUESTION, "model": "capitals"})
    assert message.model == "capitals"
    assert message.content[0].text.isupper()


def test_sdk_raises_errors_of_its_own(sdk: Any) -> None:
    """An unknown model, a limit of ours and a malformed request."""
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        sdk.messages.create(**{**QUESTION, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="LMI_MAX_STOP_STRINGS"):
        sdk.messages.create(**QUESTION, stop_sequences=["x"] * 65)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        sdk.messages.create(**{**QUESTION, "max_tokens": 0})


def test_sdk_calls_a_tool(tgi_server: RunningServer) -> None:
    """A named tool, with arguments of its schema, whole and streamed."""
    asked = {
        **QUESTION,
        "max_tokens": 120,  # the call is some 70
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "look"},
    }
    with anthropic.Anthropic(base_url=tgi_server.url, api_key="none", max_retries=0) as sdk:
        message = sdk.messages.create(**asked)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        assert (use.name, use.input["place"] in ("sea", "moon")) == ("look", True)
        assert message.stop_reason == "tool_use"
        with sdk.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        (use,) = [block for block in streamed.content if block.type == "tool_use"]
        assert use.input["place"] in ("sea", "moon")


def test_stream_that_is_left_ends_its_request(sdk: Any, demo_server: RunningServer) -> None:
    """Nothing of it is left in the queue, or in the engine."""
    with sdk.messages.stream(**{**QUESTION, "max_tokens": 1500, "stop_sequences": []}) as stream:
        next(iter(stream.text_stream))
    deadline = time.monotonic() + 5
    while "lmi_requests_in_flight 0.0" not in metrics(demo_server):
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.05)


def metrics(server: RunningServer) -> str:
    """Return all series."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
