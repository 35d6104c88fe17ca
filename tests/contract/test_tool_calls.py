"""Calls of tools: a cut answer is the same in both forms, and forced calls are bound."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make setup installs it")

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import Parser, ParserManager
from vllm.tokenizers import get_tokenizer

from lmi_vllm.demo import DEMO_MODEL_DIR
from lmi_vllm.engine.vllm.workarounds import tool_calls
from lmi_vllm.engine.vllm.workarounds.client_faults import leave_out_faults_of_clients
from lmi_vllm.engine.vllm.workarounds.parsers import Alarm, limited

pytestmark = pytest.mark.vllm
USER = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"place": {"enum": ["sea"]}}, "required": ["place"]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
REQUEST = ChatCompletionRequest(messages=USER, tools=[LOOK])
OBJECT = '{"name": "look", "arguments": {"place": "sea"}}'
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"
# Parser -> an answer of its kind; the last three have an engine of vLLM's own.
ANSWERS = {
    "hermes": f"hi {HERMES}\n{HERMES}",
    "xlam": f"[{OBJECT}]",
    "longcat": f"<longcat_tool_call>\n{OBJECT}\n</longcat_tool_call>",
    "pythonic": '[look(place="sea")]',
    "internlm": 'hi<|action_start|><|plugin|>{"name": "look", "parameters": {"place": "sea"}}',
    "granite-20b-fc": f"<function_call> {OBJECT}",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "phi4_mini_json": f"functools[{OBJECT}]",
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n<parameter=place>\nsea\n</parameter>\n</function>\n"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">sea</parameter>\n'
    ),
}
MARKS = (
    "<tool_call>", "</tool_call>", "<longcat_tool_call>", "</longcat_tool_call>",
    "<|action_start|>", "<|plugin|>", "<|tool_call|>", "<minimax:tool_call>",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo model's tokenizer, with the tokens that the parsers look for."""
    known = get_tokenizer(str(DEMO_MODEL_DIR))
    known.add_tokens(list(MARKS))
    return known


def parser(tokenizer: Any, name: str) -> Any:
    """Return a parser of one answer, as a handler of the application makes it."""
    kind = limited(ParserManager.get_parser(name, enable_auto_tools=True), Alarm())
    made = kind(tokenizer, REQUEST.tools)
    if hasattr(Parser, "set_prompt_token_ids"):  # 0.31 has no use for them
        made.set_prompt_token_ids([1])
    return made


def streamed(tokenizer: Any, name: str, ids: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls of a stream, token by token."""
    reading, text, content = parser(tokenizer, name), "", ""
    calls: dict[int, list[str]] = {}
    for count in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:count], skip_special_tokens=False)
        step, text = now[len(text) :], now
        is_last = count == len(ids)
        message = reading.parse_delta(
            step, [ids[count - 1]], request=REQUEST, prompt_token_ids=[1], finished=is_last
        )
        content += (message and message.content) or ""
        for delta in (message and message.tool_calls) or ():
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.function.name or ""
            call[1] += delta.function.arguments or ""
    return content, [(name, arguments) for name, arguments in calls.values()]


def whole(
    tokenizer: Any, name: str, ids: list[int], text: str | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls of a whole answer that `max_tokens`, or a stop text, cut."""
    text = text or tokenizer.decode(ids, skip_special_tokens=False)
    tool_calls._CUT.set((ids,))
    _, content, calls = parser(tokenizer, name).parse(
        text, REQUEST, enable_auto_tools=True, model_output_token_ids=ids
    )
    tool_calls._CUT.set(())
    return content or "", [(call.name, call.arguments) for call in calls or ()]


@pytest.mark.parametrize("name", ANSWERS)
def test_cut_answer_is_the_same_in_both_forms(tokenizer: Any, name: str) -> None:
    """Wherever it was cut; a name is there once it is complete, and so are complete calls."""
    ids = tokenizer.encode(ANSWERS[name], add_special_tokens=False)
    for count in range(1, len(ids) + 1):
        cut = ids[:count]
        assert whole(tokenizer, name, cut) == streamed(tokenizer, name, cut), count
    assert ("look", '{"place": "sea"}') in whole(tokenizer, name, ids)[1] or name == "internlm"


@pytest.mark.parametrize("name", ["hermes", "longcat", "qwen3_coder"])
def test_answer_that_a_stop_text_cut_is_the_same_in_both_forms(tokenizer: Any, name: str) -> None:
    """The tokens of the stop text are there, and their text is not."""
    ids = tokenizer.encode(ANSWERS[name], add_special_tokens=False)
    for count in range(2, len(ids) + 1):
        text = tokenizer.decode(ids[: count - 1], skip_special_tokens=False)
        found = whole(tokenizer, name, ids[:count], text)
        assert found == streamed(tokenizer, name, ids[: count - 1]), count


def test_call_of_a_parser_that_streams_none_comes_at_the_end(tokenizer: Any) -> None:
    """It was a text, and a call in a whole answer."""
    ids = tokenizer.encode(f"functools[{OBJECT}]", add_special_tokens=False)
    assert streamed(tokenizer, "phi4_mini_json", ids) == ("", [("look", '{"place": "sea"}')])


def test_cut_beginning_of_a_call_is_text(tokenizer: Any) -> None:
    """What no call came of is not lost, also where it only looks like the beginning of one."""
    for text in ("hi <tool_ca", "hi <tool_call>\n{", "is a < b"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert streamed(tokenizer, "hermes", ids) == (text, [])


def test_complete_call_beside_a_cut_one_is_kept(tokenizer: Any) -> None:
    """A call that has no arguments yet does not say that it has none."""
    text = f'{HERMES}\n<tool_call>\n{{"name": "look", "arg'
    ids = tokenizer.encode(text, add_special_tokens=False)
    complete = ("look", '{"place": "sea"}')
    assert whole(tokenizer, "hermes", ids) == ("", [complete, ("look", "")])


def test_long_answer_is_read_in_few_steps(tokenizer: Any, monkeypatch: Any) -> None:
    """Only the last tokens come one by one."""
    monkeypatch.setattr(tool_calls, "SINGLE_TOKENS", 20)
    ids = tokenizer.encode("a long text " * 50 + HERMES[:-20], add_special_tokens=False)
    content, calls = whole(tokenizer, "hermes", ids)
    assert (content, len(calls)) == ("a long text " * 50, 1)


def test_plain_vllm_reads_a_cut_call_as_text(tokenizer: Any) -> None:
    """`tool_calls.py`: the complete call before it, too."""
    text = f"{HERMES}\n{HERMES[:40]}"
    plain = ParserManager.get_parser("hermes", enable_auto_tools=True)(tokenizer, REQUEST.tools)
    assert plain.parse(text, REQUEST, enable_auto_tools=True)[1:] == (text, None)


def unread(tokenizer: Any) -> None:
    """Let a parser read a call that is no JSON, and one that is no object, in both forms."""
    for text in ('<tool_call>\n{"name": "look", arg\n</tool_call>', "<tool_call>\n5\n</tool_call>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        plain = ParserManager.get_parser("hermes", enable_auto_tools=True)(tokenizer, REQUEST.tools)
        assert plain.parse(text, REQUEST, enable_auto_tools=True)[1:] == (text, None)
        streamed(tokenizer, "hermes", ids)


@pytest.fixture
def parser_log() -> Iterator[logging.Logger]:
    """The logger of the parser as vLLM has it: another test's server may have changed it."""
    logger = logging.getLogger("vllm.tool_parsers.hermes_tool_parser")
    kept, logger.filters = logger.filters, []
    yield logger
    logger.filters = kept


def test_call_that_is_no_json_is_not_logged(
    tokenizer: Any, parser_log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    """What a parser fails on for another reason is."""
    leave_out_faults_of_clients()
    unread(tokenizer)
    assert caplog.records == []
    parser_log.error("ours", exc_info=OSError("ours"))
    assert {record.message for record in caplog.records} == {"ours"}


@pytest.mark.usefixtures("parser_log")
def test_plain_vllm_logs_a_call_that_is_no_json_with_its_traceback(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`client_faults.py`: a client can have such a text written."""
    unread(tokenizer)
    assert caplog.records[0].exc_info


def schema_of(kind: Any, tokenizer: Any, request: Any) -> Any:
    """Return what binds the arguments of a call in a request that a parser has adjusted."""
    adjusted = kind(tokenizer, request.tools).adjust_request(request)
    tag = json.loads(adjusted.structured_outputs.structural_tag)
    return json.dumps(tag["format"])


def requests(strict: bool | None, schema: dict[str, Any] | None = SCHEMA) -> list[Any]:
    """Return requests with a forced call: chats and a response."""
    function = {"name": "look", "parameters": schema, "strict": strict}
    tools, named = [{"type": "function", "function": function}], {"name": "look"}
    return [
        ChatCompletionRequest(messages=USER, tools=tools, tool_choice="required"),
        ChatCompletionRequest(
            messages=USER, tools=tools, tool_choice={"type": "function", "function": named}
        ),
        ResponsesRequest(
            input="x", tools=[{"type": "function", **function}], tool_choice="required"
        ),
    ]


def test_arguments_of_a_forced_call_are_bound(tokenizer: Any) -> None:
    """Unless the tool says `strict: false`; the request's own tools stay as they are."""
    kind = limited(ParserManager.get_parser("hermes", enable_auto_tools=True), Alarm())
    for strict in (None, True):
        for request in requests(strict):
            before = [tool.model_dump() for tool in request.tools]
            assert '"enum": ["sea"]' in schema_of(kind, tokenizer, request)
            assert [tool.model_dump() for tool in request.tools] == before
    for request in requests(strict=False):
        assert '"enum"' not in schema_of(kind, tokenizer, request)
        assert '{"type": "object"}' in schema_of(kind, tokenizer, request)


@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("schema", [None, {}, {"title": "x"}])
@pytest.mark.parametrize("name", ["hermes", "longcat", "qwen3_coder"])
def test_arguments_without_a_schema_are_an_object(
    tokenizer: Any, name: str, schema: dict[str, Any] | None, strict: bool | None
) -> None:
    """Of chats (and so of messages), and of responses: `false` is none."""
    kind = limited(ParserManager.get_parser(name, enable_auto_tools=True), Alarm())
    for request in requests(strict, schema):
        assert "false" not in [json.dumps(one) for one in schemas_of(kind, tokenizer, request)]
        assert all(one.get("type") == "object" for one in schemas_of(kind, tokenizer, request))


def schemas_of(kind: Any, tokenizer: Any, request: Any) -> list[Any]:
    """Return the schemas of arguments in what binds a forced call, by a tag or by a JSON schema."""
    adjusted = kind(tokenizer, request.tools).adjust_request(request)
    bound = adjusted.extract_structured_outputs()
    if bound.structural_tag is None:
        schema = bound.json if isinstance(bound.json, dict) else json.loads(bound.json)
        if "items" in schema:
            return [one["properties"]["parameters"] for one in schema["items"]["anyOf"]]
        return [schema]
    return list(found_schemas(json.loads(bound.structural_tag)))


def found_schemas(node: Any) -> Iterator[Any]:
    """Yield what any part of a structural tag has as `json_schema`."""
    if isinstance(node, dict):
        if "json_schema" in node:
            yield node["json_schema"]
        for part in node.values():
            yield from found_schemas(part)
    elif isinstance(node, list):
        for part in node:
            yield from found_schemas(part)


def test_plain_vllm_binds_no_arguments_of_a_forced_call(tokenizer: Any) -> None:
    """`tool_calls.py`: without `strict`, though its documentation says so."""
    kind = ParserManager.get_parser("hermes", enable_auto_tools=True)
    for request in requests(strict=None):
        assert '"enum"' not in schema_of(kind, tokenizer, request)


def event(**fields: Any) -> ChatCompletionStreamResponse:
    """Return the object that an event of a stream of chats is made of."""
    return ChatCompletionStreamResponse(model="lmi", choices=[{"index": 0, **fields}])


def events_of_a_cut_call() -> list[ChatCompletionStreamResponse]:
    """Return those of a call whose arguments a stop text cut."""
    function = {"name": "look", "arguments": '{"place": "'}
    call = {"index": 0, "id": "1", "type": "function", "function": function}
    end = {"finish_reason": "tool_calls", "stop_reason": "sea"}
    return [event(delta={"tool_calls": [call]}), event(delta={}, **end)]


@pytest.mark.parametrize("form", ["text", "objects"])
async def test_stream_that_a_stop_text_cut_ends_with_stop(form: str) -> None:
    """Before vLLM 0.33 a stream of messages is made of the text, from it on of objects."""

    async def plain(_: object) -> AsyncIterator[Any]:
        for one in events_of_a_cut_call():
            yield one if form == "objects" else f"data: {one.model_dump_json()}\n\n"

    handler = SimpleNamespace(
        chat_completion_full_generator=None, chat_completion_stream_generator=plain
    )
    if form == "objects":
        handler.chat_completion_stream_generator_raw = plain
    tool_calls.read_calls_alike({"chats": handler})
    request = REQUEST.model_copy(update={"stop": ["sea"]})
    name = "chat_completion_stream_generator" + ("_raw" if form == "objects" else "")
    events = [one async for one in getattr(handler, name)(request)]
    last = events[-1] if form == "objects" else json.loads(events[-1].removeprefix("data: "))
    assert ChatCompletionStreamResponse.model_validate(last).choices[0].finish_reason == "stop"
