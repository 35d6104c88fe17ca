"""What coding agents send, as they send it: over Anthropic's messages and over chat completions.

Large system prompts in blocks, a dozen tools, thinking in the history, results of tools, streams,
headers and fields that no server has to know.
"""

import json
from typing import Any, Final

import pytest

from integration.client import Answer, call
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
TOOLS: Final = ("Bash", "Edit", "Glob", "Grep", "Read", "Write", "WebFetch", "TodoWrite")
SCHEMA: Final = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "Where."},
        "limit": {"type": "number", "minimum": 1},
    },
    "required": ["path"],
    "additionalProperties": False,
}
SYSTEM: Final = "You help with software. Answer briefly. " * 12
HEADERS: Final = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-api-key": "none",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
}
CACHED: Final = {"cache_control": {"type": "ephemeral"}}


def _messages(**more: object) -> dict[str, Any]:
    """Return a turn of an agent: it has thought, called two tools, and brings what they said."""
    used = [
        {"type": "tool_use", "id": f"toolu_{name}", "name": name, "input": {"path": "a.py"}}
        for name in ("Read", "Grep")
    ]
    said = [
        {"type": "tool_result", "tool_use_id": "toolu_Read", "content": "1\tprint(1)"},
        {
            "type": "tool_result",
            "tool_use_id": "toolu_Grep",
            "is_error": True,
            "content": [{"type": "text", "text": "no such file"}],
        },
    ]
    thought = {"type": "thinking", "thinking": "I look at the file.", "signature": "c2ln"}
    return {
        "model": "lmi",
        "max_tokens": 24,
        "temperature": 0,
        "metadata": {"user_id": "user_1_account__session_2"},
        "system": [
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": SYSTEM, **CACHED},
        ],
        "tools": [
            {"name": name, "description": f"{name} something.", "input_schema": SCHEMA}
            for name in TOOLS
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Fix it.", **CACHED}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, *used]},
            {"role": "user", "content": [*said, {"type": "text", "text": "Go on.", **CACHED}]},
        ],
        **more,
    }


def _events(answer: Answer) -> list[dict[str, Any]]:
    lines = answer.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive"}])
def test_turn_over_messages(tgi_server: RunningServer, thinking: dict[str, str]) -> None:
    """Streamed and whole say the same, and the prompt counts as many tokens as are counted."""
    body = _messages(thinking=thinking)
    path = "/v1/messages?beta=true"
    whole = call(tgi_server.url, path, body, headers=HEADERS)
    assert whole.status == 200, whole.body
    answer = whole.json()
    events = _events(call(tgi_server.url, path, {**body, "stream": True}, headers=HEADERS))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
    assert "".join(delta.get("text", "") for delta in deltas) == "".join(texts)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    body = {name: body[name] for name in ("model", "system", "tools", "messages", "thinking")}
    counted = call(tgi_server.url, "/v1/messages/count_tokens?beta=true", body, headers=HEADERS)
    usage = answer["usage"]
    prompt = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    assert counted.json()["input_tokens"] == prompt > 200


def test_turn_over_chat(tgi_server: RunningServer) -> None:
    """OpenAI's shapes: content in parts, calls in the history, results as `tool` messages."""
    called = [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": name, "arguments": '{"path": "a.py"}'},
        }
        for name in ("Read", "Grep")
    ]
    body = {
        "model": "lmi",
        "temperature": 0,
        "max_completion_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": True,
        "user": "user_1",
        "store": False,
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS
        ],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": [{"type": "text", "text": "Fix it."}]},
            {"role": "assistant", "content": None, "tool_calls": called},
            {"role": "tool", "tool_call_id": "call_Read", "content": "1\tprint(1)"},
            {"role": "tool", "tool_call_id": "call_Grep", "content": "no such file"},
            {"role": "user", "content": "Go on."},
        ],
    }
    answer = call(tgi_server.url, "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    events = _events(answer)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["prompt_tokens"] > 200
    assert events[-2]["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")


def test_budget_of_thoughts_has_to_fit(tgi_server: RunningServer) -> None:
    """Refused by name, as vLLM refuses what its models cannot read."""
    body = _messages(thinking={"type": "enabled", "budget_tokens": 1024})
    answer = call(tgi_server.url, "/v1/messages", body, headers=HEADERS)
    assert (answer.status, b"budget_tokens must be less than max_tokens" in answer.body) == (
        400,
        True,
    )
