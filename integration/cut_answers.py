"""Answers that do not come to their own end: cut at `max_tokens`, or where a grammar is at its end.

Whole and streamed they say the same, on every route that has them.
"""

import json
from typing import Any

import pytest

from integration.client import call
from integration.conftest import RunningServer

pytestmark = pytest.mark.vllm
USER = [{"role": "user", "content": "x"}]
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": PLACE}
LOOK = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\\n\\{"name": "look", "arguments": \\{"place": "sea"\\}\\}\\n</tool_call>'
# The branch that the model takes has no end; the other one does.
DEAD_END = {"grammar": 'root ::= "x" ("a" dead | "b")\ndead ::= "z" never\nnever ::= never "q"'}
REASON = "has a dead end: after the text so far neither more nor the end may come"


def rows_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the data of a stream's events."""
    answer = call(server.url, path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line[5:]) for line in lines if not line.endswith("[DONE]")]


def both_forms(server: RunningServer, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a whole chat and a stream say: content, calls, end."""
    choice = call(server.url, "/v1/chat/completions", asked).json()["choices"][0]
    message = choice["message"]
    calls = [called["function"] for called in message.get("tool_calls") or ()]
    found = [{"text": message["content"] or "", "calls": calls, "end": choice["finish_reason"]}]
    text, end, joined = "", None, dict[int, dict[str, str]]()
    for row in rows_of(server, "/v1/chat/completions", asked):
        (choice,) = row["choices"]
        text += choice["delta"].get("content") or ""
        end = choice["finish_reason"] or end
        for delta in choice["delta"].get("tool_calls") or ():
            whole = joined.setdefault(delta["index"], {"name": "", "arguments": ""})
            for name in whole:
                whole[name] += delta["function"].get(name) or ""
    return [*found, {"text": text, "calls": list(joined.values()), "end": end}]


@pytest.mark.parametrize(("length", "count"), [(8, 0), (30, 1), (45, 1), (100, 2)])
def test_cut_tool_call_is_the_same_in_both_forms(
    tgi_server: RunningServer, length: int, count: int
) -> None:
    """In its mark, before its arguments, in them, and in a second one."""
    constraint = {"regex": f"{CALL}\\n{CALL}"}
    asked = {"messages": USER, "tools": [LOOK], "temperature": 0, "structured_outputs": constraint}
    whole, streamed = both_forms(tgi_server, {**asked, "max_tokens": length})
    assert whole == streamed
    assert (whole["end"], len(whole["calls"])) == ("length", count)


STOPS: dict[str, tuple[str, str, list[str]]] = {  # stop text -> how it ends, arguments of calls
    "in the arguments": ("sea", "stop", ['{"place": "']),
    "in the name": ("lo", "stop", []),
    "in the mark": ("_call", "stop", []),
    "after the call": ("\n</tool", "tool_calls", ['{"place": "sea"}']),
}


@pytest.mark.parametrize(("stop", "end", "arguments"), STOPS.values(), ids=STOPS)
def test_call_that_a_stop_text_cuts_is_the_same_in_both_forms(
    tgi_server: RunningServer, stop: str, end: str, arguments: list[str]
) -> None:
    """A call that is complete is no less one; what is none does not end with "tool_calls"."""
    constraint = {"regex": CALL}
    asked = {"messages": USER, "tools": [LOOK], "temperature": 0, "structured_outputs": constraint}
    whole, streamed = both_forms(tgi_server, {**asked, "max_tokens": 100, "stop": stop})
    assert whole == streamed
    assert (whole["end"], [one["arguments"] for one in whole["calls"]]) == (end, arguments)


@pytest.mark.parametrize("stop", ['": ', "plac", "_call"])
def test_forced_call_that_a_stop_text_cuts_ends_with_stop(
    tgi_server: RunningServer, stop: str
) -> None:
    """It ended with "tool_calls", which a client takes for a whole call."""
    asked = {"messages": USER, "tools": [LOOK], "temperature": 0, "tool_choice": "required"}
    whole, streamed = both_forms(tgi_server, {**asked, "max_tokens": 60, "stop": stop})
    assert whole == streamed
    assert whole["end"] == "stop"


def test_cut_tool_call_is_a_block_of_a_message(tgi_server: RunningServer) -> None:
    """Anthropic's form has an object: what can be read of it."""
    tool = {"name": "look", "input_schema": PLACE}
    asked = {"model": "lmi", "messages": USER, "tools": [tool], "max_tokens": 40}
    answer = call(tgi_server.url, "/v1/messages", {**asked, "tool_choice": {"type": "any"}}).json()
    (block,) = answer["content"]
    found = answer["stop_reason"], block["type"], block.get("name")
    assert found == ("max_tokens", "tool_use", "look")


def test_cut_response_is_incomplete_in_both_forms(tgi_server: RunningServer) -> None:
    """As OpenAI's API says, also of a cut call."""
    tool = {"type": "function", **FUNCTION}
    asked = {"input": "x", "max_output_tokens": 40, "tools": [tool], "tool_choice": "required"}
    answer = call(tgi_server.url, "/v1/responses", asked).json()
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][-1]["status"] == "incomplete"
    rows = rows_of(tgi_server, "/v1/responses", asked)
    assert rows[-1]["type"] == "response.incomplete"
    assert rows[-1]["response"]["output"][-1]["status"] == "incomplete"
    assert [row["item"]["status"] for row in rows if "item" in row][-1] == "incomplete"
    assert "response.completed" not in {row["type"] for row in rows}


FREE = {"name": "look"}
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": USER, "max_tokens": 60, "tool_choice": "look",
        "tools": [{"type": "function", "function": FREE}],
    },
    "/v1/responses": {
        "input": "x", "max_output_tokens": 60, "tool_choice": "required",
        "tools": [{"type": "function", **FREE, "parameters": {}}],
    },
    "/v1/messages": {
        "model": "lmi", "messages": USER, "max_tokens": 60, "tool_choice": {"type": "any"},
        "tools": [{**FREE, "input_schema": {}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_arguments_without_a_schema_are_an_object(tgi_server: RunningServer, path: str) -> None:
    """Whole and streamed; the model's own choice were `false`."""
    asked = {**CALLS[path], "temperature": 0}
    answer = call(tgi_server.url, path, asked).json()
    rows = rows_of(tgi_server, path, asked)
    if path == "/v1/responses":
        whole = answer["output"][0]["arguments"]
        parts = [row["delta"] for row in rows if row["type"].endswith("arguments.delta")]
    elif path == "/v1/messages":
        whole = json.dumps(answer["content"][0]["input"])
        deltas = [row["delta"] for row in rows if row["type"] == "content_block_delta"]
        parts = [delta.get("partial_json", "") for delta in deltas]
    else:
        whole = answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
        calls = [row["choices"][0]["delta"].get("tool_calls") for row in rows if row["choices"]]
        parts = [one["function"].get("arguments") or "" for some in calls for one in some or ()]
    assert whole.startswith("{")
    assert "".join(parts).startswith("{")


CHAT = {"messages": USER}
DEAD_ENDS = {
    "completions": ("/v1/completions", {"prompt": "x"}, "max_tokens", 400),
    "two completions": ("/v1/completions", {"prompt": "x", "n": 2}, "max_tokens", 400),
    "chat": ("/v1/chat/completions", CHAT, "max_tokens", 400),
    "chat on LMI's route": ("/invocations", CHAT, "max_tokens", 422),
    "response": ("/v1/responses", {"input": "x"}, "max_output_tokens", 400),
}


@pytest.mark.parametrize(("path", "body", "length", "status"), DEAD_ENDS.values(), ids=DEAD_ENDS)
def test_dead_end_of_a_grammar_is_the_client_s_error(
    tgi_server: RunningServer, path: str, body: dict[str, Any], length: str, status: int
) -> None:
    """In the form of the route; a stream has its other tokens, and the error is its end."""
    bias = {str(_token(tgi_server, "b")): -100}
    asked = {**body, length: 20, "logit_bias": bias, "structured_outputs": DEAD_END}
    answer = call(tgi_server.url, path, asked)
    assert (answer.status, REASON in answer.body.decode()) == (status, True)
    last = json.dumps(rows_of(tgi_server, path, asked)[-1])
    assert REASON in last
    assert "Internal" not in last


def test_dead_end_of_tokens_is_the_client_s_error(tgi_server: RunningServer) -> None:
    """`/inference/v1/generate`, whose parameters are vLLM's own."""
    bias = {str(_token(tgi_server, "b")): -100}
    sampling = {"max_tokens": 20, "logit_bias": bias, "structured_outputs": DEAD_END}
    body = {"token_ids": [5, 6], "sampling_params": sampling}
    answer = call(tgi_server.url, "/inference/v1/generate", body)
    assert (answer.status, REASON in answer.body.decode()) == (400, True)
    assert REASON in json.dumps(rows_of(tgi_server, "/inference/v1/generate", body)[-1])


def _token(server: RunningServer, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False, "inputs": text}
    found = call(server.url, "/tokenize", body).json()
    return int(found["tokens"][0] if isinstance(found, dict) else found[0]["id"])
