"""Calls of tools in a stream are those of the whole answer, however many tokens a step has."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.workarounds import is_affected
from lmi_vllm.engine.vllm.workarounds.parsers import Alarm, limited

pytestmark = pytest.mark.vllm
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
REQUEST = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=[LOOK])
# Parser -> an answer that has the text of a call.
ANSWERS = {
    "hermes": "hi <tool_call>\n%s\n</tool_call>\n<tool_call>\n%s\n</tool_call>",
    "qwen3_json": "hi <tool_call>\n%s\n</tool_call>",
    "longcat": "<longcat_tool_call>\n%s\n</longcat_tool_call>",
    "xlam": "[%s, %s]",
    "hunyuan_a13b": "hi <tool_calls>[%s, %s]</tool_calls>",
    "gigachat3": "hi<|function_call|>%s",
}
CALLS = {
    "usual": '{"name": "look", "arguments": {"place": "sea"}}',
    "arguments first": '{"arguments": {"place": "sea"}, "name": "look"}',
    "close": '{"arguments":{"place":"sea"},"name":"look"}',
    "a name in them": '{"arguments": {"name": "x}", "place": "sea"}, "name": "look"}',
    "arguments in them": '{"name": "look", "arguments": {"arguments": {"a": [1, {}]}}}',
    "keys around": '{"id": "a", "name": "look", "arguments": {"place": "a \\" b"}, "at": [2]}',
    "escapes": '{"n\\u0061me": "l\\u006fok", "arguments": {}}',
    "lines": '{\n  "name": "look",\n  "arguments": {\n    "place": "sea"\n  }\n}',
}
MARKS = ("<tool_call>", "</tool_call>", "<longcat_tool_call>", "</longcat_tool_call>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo model's tokenizer, with the tokens that the parsers look for."""
    known = get_tokenizer(str(DEMO_MODEL_DIR))
    known.add_tokens(list(MARKS))
    return known


def ours(name: str) -> type:
    """Return the class of a parser, as a handler of the application has it; 0.31 lacks one."""
    if name == "qwen3_json" and is_affected("vllm", "0.32"):
        pytest.skip(f"this vLLM has no parser {name}")
    return limited(ParserManager.get_parser(name, enable_auto_tools=True), Alarm())


def streamed(kind: type, tokenizer: Any, text: str, size: int) -> tuple[str, list[list[str]]]:
    """Return content and calls of a stream with that many tokens in a step."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    reading, done, content = kind(tokenizer, REQUEST.tools), "", ""
    calls: dict[int, list[str]] = {}
    for start in range(0, len(ids), size):
        now = tokenizer.decode(ids[: start + size], skip_special_tokens=False)
        message = reading.parse_delta(
            now[len(done) :],
            ids[start : start + size],
            request=REQUEST,
            prompt_token_ids=[1],
            finished=start + size >= len(ids),
        )
        done = now
        content += (message and message.content) or ""
        for delta in (message and message.tool_calls) or ():
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    return content, list(calls.values())


def whole(kind: type, tokenizer: Any, text: str) -> tuple[str, list[list[str]]]:
    """Return content and calls of the whole answer."""
    made = kind(tokenizer, REQUEST.tools)
    _, content, calls = made.parse(text, REQUEST, enable_auto_tools=True)
    return content or "", [[call.name, call.arguments] for call in calls or ()]


def read(calls: list[list[str]]) -> list[tuple[str, Any]]:
    """Return the calls with their arguments as values: a stream has them as they were written."""
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ANSWERS)
def test_stream_has_the_calls_of_the_whole_answer(tokenizer: Any, name: str, call: str) -> None:
    """Wherever its keys stand; one token, a few, or all in a step."""
    text, expected = ANSWERS[name].replace("%s", CALLS[call]), json.loads(CALLS[call])
    content, calls = whole(ours(name), tokenizer, text)
    count = ANSWERS[name].count("%s")
    assert read(calls) == [(expected["name"], expected["arguments"])] * count
    for size in (1, 2, 3, 1000):
        found = streamed(ours(name), tokenizer, text, size)
        assert (found[0].strip(), read(found[1])) == (content.strip(), read(calls)), size


@pytest.mark.parametrize("name", ["hermes", "qwen3_json", "longcat"])
def test_call_without_arguments_has_none(tokenizer: Any, name: str) -> None:
    """It was a text in a whole answer, and a call with the arguments `` in a stream."""
    text = ANSWERS[name].replace("%s", '{"name": "look"}')
    count = ANSWERS[name].count("%s")
    assert whole(ours(name), tokenizer, text)[1] == [["look", "{}"]] * count
    assert streamed(ours(name), tokenizer, text, 1)[1] == [["look", "{}"]] * count


@pytest.mark.parametrize("text", ["<tool_call>\n[1]\n</tool_call>", '<tool_call>{"name": 5}'])
def test_call_that_is_none_stays_content(tokenizer: Any, text: str) -> None:
    """In both forms."""
    for size in (1, 1000):
        found = streamed(ours("hermes"), tokenizer, text, size)
        assert found == whole(ours("hermes"), tokenizer, text) == (text, [])


def test_what_begins_no_call_is_streamed(tokenizer: Any) -> None:
    """Code before it has ended, too: only a list may be a call."""
    begun = "```python\nx = [1]\n"
    text = f"{begun}``` and more"
    reading = ours("xlam")(tokenizer, REQUEST.tools)
    first = reading.parse_delta(begun, [1], request=REQUEST, prompt_token_ids=[1], finished=False)
    assert first.content == begun
    assert streamed(ours("xlam"), tokenizer, text, 1) == (text, [])


def test_plain_vllm_streams_what_comes_after_the_arguments(tokenizer: Any) -> None:
    """`call_streams.py`: as if it were of the arguments."""
    plain = ParserManager.get_parser("hermes", enable_auto_tools=True)
    text = "<tool_call>\n" + CALLS["arguments first"] + "\n</tool_call>"
    arguments = '{"place": "sea"}'
    assert whole(plain, tokenizer, text)[1] == [["look", arguments]]
    broken = arguments + ', "name": "look"'
    assert streamed(plain, tokenizer, text, 1)[1] == [["look", broken]]


@pytest.mark.parametrize("name", ["xlam", "hunyuan_a13b", "gigachat3"])
def test_plain_vllm_streams_broken_arguments_of_several_tokens(tokenizer: Any, name: str) -> None:
    """`call_streams.py`: not those of the whole answer."""
    plain = ParserManager.get_parser(name, enable_auto_tools=True)
    text = ANSWERS[name].removeprefix("hi ").replace("%s", CALLS["usual"])
    expected = whole(plain, tokenizer, text)[1]
    assert any(streamed(plain, tokenizer, text, size)[1] != expected for size in (2, 3, 1000))
