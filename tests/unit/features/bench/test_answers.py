"""Answers of every dialect, cut anywhere, to outcomes; what is no whole answer is an error."""

import json
from typing import Any

import pytest

from lmi_vllm.features.bench.dialects import DIALECTS, Answer
from lmi_vllm.features.bench.plan import LoadPlan, LoadRequest, RequestOutcome


def lines(*rows: Any, head: str = "", tail: str = "\n") -> bytes:
    """Return rows as a server frames them."""
    return "".join(f"{head}{json.dumps(row)}{tail}" for row in rows).encode()


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    """Return a chunk of a completion."""
    return {"choices": [{"text": piece, "finish_reason": finish}]}


def delta(content: str | None, finish: str | None = None) -> dict[str, Any]:
    """Return a chunk of a chat."""
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}}
TOKEN = {"index": 0, "token": {"id": 5, "text": " a"}}
LAST = {"index": 0, "token": {"id": 9, "text": " b"}, "generated_text": " a b"}
SSE = {"head": "data: ", "tail": "\n\n"}
STREAMS = {
    "lmi": (lines(TOKEN, TOKEN, LAST), 3),
    "tgi": (lines(TOKEN, LAST, head="data:", tail="\n\n"), 2),
    "completions": (lines(text("a"), text("b", "stop"), USAGE, **SSE) + b"data: [DONE]\n\n", 5),
    "chat": (b": hello\n\n" + lines(delta(None), delta("a"), delta("", "stop"), USAGE, **SSE), 5),
}


def read(dialect: str, body: bytes, size: int, *, is_streaming: bool = True) -> RequestOutcome:
    """Return the outcome of an answer that comes in pieces of `size` bytes, one a second."""
    outcome = RequestOutcome(0.0)
    answer = Answer(DIALECTS[dialect], outcome, is_streaming)
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    for second, piece in enumerate(pieces):
        answer.feed(piece, float(second))
    answer.end(float(len(pieces)))
    return outcome


@pytest.mark.parametrize("size", [1, 7, 37, 10_000])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_tokens_are_counted_wherever_the_bytes_are_cut(dialect: str, size: int) -> None:
    """By rows, or by `usage` where the dialect says it."""
    body, tokens = STREAMS[dialect]
    outcome = read(dialect, body, size)
    assert outcome.error is None, outcome.example
    assert outcome.output_tokens == tokens
    assert outcome.first_token is not None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_without_its_end_is_an_error(dialect: str) -> None:
    """A server that dies in the middle has not answered."""
    body, _ = STREAMS[dialect]
    rows = body.splitlines(keepends=True)
    last = next(n for n, row in enumerate(rows) if b"generated_text" in row or b"stop" in row)
    assert read(dialect, b"".join(rows[:last]), 10_000).error == "stream cut"


@pytest.mark.parametrize(
    ("dialect", "body", "said"),
    [
        ("lmi", lines(TOKEN, {"error": "no room", "code": 424}), "no room"),
        ("tgi", lines({"error": "busy", "error_type": "overloaded"}, **SSE), "busy"),
        ("chat", lines(delta("a"), {"error": {"message": "died"}}, **SSE), "died"),
        ("completions", b"<html>bad gateway</html>", "bad gateway"),
    ],
    ids=["lmi", "tgi", "chat", "no JSON"],
)
def test_error_in_the_stream_is_reported_as_it_came(dialect: str, body: bytes, said: str) -> None:
    """Although the status was 200."""
    outcome = read(dialect, body, 10_000)
    assert outcome.error == "error in the answer"
    assert said in outcome.example


@pytest.mark.parametrize(
    ("dialect", "document", "tokens"),
    [
        ("lmi", {"generated_text": "a", "details": {"generated_tokens": 3}}, 3),
        ("tgi", [{"generated_text": "a", "details": {"generated_tokens": 3}}], 3),
        ("chat", {"choices": [{}], "usage": {"completion_tokens": 4, "prompt_tokens": 2}}, 4),
    ],
)
def test_whole_answers_say_their_tokens(dialect: str, document: Any, tokens: int) -> None:
    """There is no first token to time."""
    body = json.dumps(document).encode()
    outcome = read(dialect, body, 5, is_streaming=False)
    assert (outcome.error, outcome.output_tokens, outcome.first_token) == (None, tokens, None)


def test_each_dialect_asks_for_the_planned_request() -> None:
    """Length, adapter and end in its own words."""
    plan, request = LoadPlan(ignores_eos=True), LoadRequest("p", 7, "mine")
    bodies = {name: one.body(request, plan, "lmi") for name, one in DIALECTS.items()}
    assert bodies["lmi"]["parameters"] == {"max_new_tokens": 7, "ignore_eos_token": True}
    assert (bodies["lmi"]["adapters"], bodies["lmi"]["stream"]) == ("mine", True)
    assert bodies["tgi"]["parameters"]["adapter_id"] == "mine"
    assert (bodies["chat"]["model"], bodies["chat"]["max_tokens"]) == ("mine", 7)
    assert bodies["completions"]["stream_options"] == {"include_usage": True}
    assert not any("temperature" in str(body) for body in bodies.values())
    base = DIALECTS["chat"].body(LoadRequest("p", 7), LoadPlan(is_streaming=False), "lmi")
    assert base == {
        "messages": [{"role": "user", "content": "p"}],
        "model": "lmi",
        "max_tokens": 7,
    }


@pytest.mark.parametrize(
    ("temperature", "lmi", "openai"),
    [
        (None, {}, {}),
        (0.0, {"do_sample": False}, {"temperature": 0.0}),
        (0.7, {"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
    ],
)
def test_temperature_has_each_dialect_s_name(
    temperature: float | None, lmi: dict[str, Any], openai: dict[str, Any]
) -> None:
    """Zero is greedy everywhere, and nothing is said where nothing was given."""
    plan, request = LoadPlan(temperature=temperature), LoadRequest("p", 7)
    for name in ("lmi", "tgi"):
        said = DIALECTS[name].body(request, plan, "lmi")["parameters"]
        assert said.items() >= lmi.items()
        assert ("do_sample" in said, "temperature" in said) == (bool(lmi), "temperature" in lmi)
    for name in ("completions", "chat"):
        said = DIALECTS[name].body(request, plan, "lmi")
        assert {key: said[key] for key in said if key == "temperature"} == openai
