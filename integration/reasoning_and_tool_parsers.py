"""`option.reasoning_parser` and `option.tool_call_parser` at work on the real engine.

A tiny model says nothing that a parser knows, so a regular expression makes it say so.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer, running_server

pytestmark = pytest.mark.vllm
THOUGHT = "Here is my thought process: the sea is deep\\. Here is my response: moon"
TOOL_CALL = '<tool_call>\\n\\{"name": "look", "arguments": \\{"place": "sea"\\}\\}\\n</tool_call>'
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model with both parsers; constraints hold while it reasons, too."""
    pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")
    environ = {
        "OPTION_REASONING_PARSER": "granite",
        "OPTION_STRUCTURED_OUTPUTS_CONFIG": '{"enable_in_reasoning": true}',
        "OPTION_ENABLE_AUTO_TOOL_CHOICE": "true",
        "OPTION_TOOL_CALL_PARSER": "hermes",
    }
    folder = tmp_path_factory.mktemp("parsers")
    with running_server(folder, "--demo", environ=environ) as server:
        yield server


def _saying(regex: str, **more: object) -> dict[str, Any]:
    constraint = {"regex": regex}
    return {"temperature": 0, "max_tokens": 90, "structured_outputs": constraint, **more}


def test_reasoning_is_kept_apart(server: RunningServer) -> None:
    """Thought and answer come in fields of their own: chat, its stream, and /invocations."""
    asked = _saying(THOUGHT, messages=USER)
    for path in ("/v1/chat/completions", "/invocations"):
        message = call(server.url, path, asked).json()["choices"][0]["message"]
        assert message["reasoning"].strip() == "the sea is deep."
        assert message["content"].strip() == "moon"
    rows = call(server.url, "/invocations", {**asked, "stream": True}).lines()
    deltas = [row["choices"][0]["delta"] for row in rows]
    thought = "".join(delta.get("reasoning") or "" for delta in deltas)
    assert thought.strip().startswith("the sea is deep.")
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "moon"


def test_reasoning_is_an_item_of_a_response(server: RunningServer) -> None:
    """The Responses API gives the thought as an item before the message."""
    asked = _saying(THOUGHT, input="x")
    asked["max_output_tokens"] = asked.pop("max_tokens")
    items = call(server.url, "/v1/responses", asked).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[1]["content"][0]["text"].strip() == "moon"


def test_tool_call_is_found_in_the_text(server: RunningServer) -> None:
    """With tool_choice auto the parser turns the model's own text into a call."""
    asked = _saying(TOOL_CALL, messages=USER, tools=[LOOK], tool_choice="auto")
    choice = call(server.url, "/v1/chat/completions", asked).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls", choice
    (called,) = choice["message"]["tool_calls"]
    assert called["function"]["name"] == "look"
    assert json.loads(called["function"]["arguments"]) == {"place": "sea"}
