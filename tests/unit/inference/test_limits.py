from dataclasses import replace
from typing import Any

import pytest

from lmi_vllm.errors import PayloadError
from lmi_vllm.inference.request.body import MAX_BODY_VALUES, check_values
from lmi_vllm.inference.request.limits import check_limits, check_logprobs, sequence_count
from lmi_vllm.messages import RequestLimits

LIMITS = RequestLimits(
    max_sequences=4,
    max_stop_strings=2,
    max_stop_length=5,
    max_logit_bias=3,
    max_grammar_size=20,
    max_tokenize_length=6,
)
LONG = {"type": "object", "title": "long"}
FLAT = "[" + "{}," * 300 + "{}]"


def deep(levels: int) -> Any:
    """Return lists in lists: so many levels."""
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def call_of(arguments: object) -> dict[str, Any]:
    """Return a message that calls a tool with these arguments, four levels up."""
    return {"tool_calls": [{"function": {"arguments": arguments}}]}


# What just passes, what does not, and what the text says.
BOUNDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "n": ({"n": 4}, {"n": 5}, "n: at most 4 (LMI_MAX_SEQUENCES) (got 5)"),
    "best_of": ({"best_of": 4}, {"best_of": 5}, "best_of: at most 4 (LMI_MAX_SEQUENCES) (got 5)"),
    "num_beams": ({"num_beams": 4}, {"num_beams": 5}, "num_beams: at most 4 (LMI_MAX_SEQUENCES)"),
    "stop": ({"stop": ["a", "b"]}, {"stop": ["a"] * 3}, "stop: at most 2 (LMI_MAX_STOP_STRINGS)"),
    "stop_sequences": (
        {"stop_sequences": []},
        {"stop_sequences": ["a"] * 3},
        "stop_sequences: at most 2",
    ),
    "stop length": (
        {"stop": "12345"},
        {"stop": "123456"},
        "stop: at most 5 characters each (LMI_MAX_STOP_LENGTH) (got 6)",
    ),
    "bad_words": ({"bad_words": ["a"]}, {"bad_words": ["123456"]}, "bad_words: at most 5"),
    "logit_bias": (
        {"logit_bias": {"1": 1, "2": 1, "3": 1}},
        {"logit_bias": {str(i): 1 for i in range(4)}},
        "logit_bias: at most 3 entries (LMI_MAX_LOGIT_BIAS) (got 4)",
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [1]},
        {"allowed_token_ids": [1] * 4},
        "allowed_token_ids: at most 3 entries",
    ),
    "stop_token_ids": ({}, {"stop_token_ids": [1] * 4}, "stop_token_ids: at most 3 entries"),
    "guided_regex": (
        {"guided_regex": "a" * 20},
        {"guided_regex": "a" * 21},
        "guided_regex: at most 20 bytes (LMI_MAX_GRAMMAR_SIZE) (got 21)",
    ),
    "bytes, not characters": ({}, {"guided_regex": "ü" * 11}, "(got 22)"),
    "guided_choice": ({}, {"guided_choice": ["a"] * 9}, "guided_choice: at most 20 bytes"),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json": LONG}},
        "structured_outputs: at most 20 bytes",
    ),
    "response_format": (
        {"response_format": {"type": "t"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format: at most 20 bytes",
    ),
    "grammar": ({}, {"grammar": {"type": "json", "value": LONG}}, "grammar: at most"),
    "tools": ({"tools": [{"a": 1}]}, {"tools": [{}, LONG]}, "tools[1]: at most 20 bytes"),
    "responses": ({"text": {"format": {}}}, {"text": {"format": LONG}}, "text.format: at most"),
    "messages": (
        {"messages": [{}] * 8192},
        {"messages": [{}] * 8193},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "messages of conversations": (
        {"messages": [[{}] * 8191]},
        {"messages": [[{}] * 8191, [{}]]},
        "messages: at most 8192 messages and parts of them (got 8194)",
    ),
    "messages of a wrong type": (
        {"messages": ["a"] * 8192},
        {"messages": ["a"] * 8193},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of messages": (
        {"messages": [{"content": [{}] * 8000}], "input": [{"content": [{}] * 2000}]},
        {"messages": [{"content": [{}] * 8192}]},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of a wrong type": (
        {"messages": [{"content": [1] * 8191}]},
        {"messages": [{"content": [1] * 8192}]},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of a tool's result": (
        {"messages": [{"content": [{"content": [{}] * 8190}]}]},
        {"messages": [{"content": [{"content": [{}] * 8191}]}]},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of a responses call": (
        {"input": [1] * 9000},
        {"input": [{"content": [{}] * 2048}]},
        "input: at most 2048 messages and parts of them (got 2049)",
    ),
    "parts of an output": (
        {"input": [{"output": [1] * 2047}]},
        {"input": [{"output": [1] * 2048}]},
        "input: at most 2048 messages and parts of them (got 2049)",
    ),
    "calls of a message": (
        {"messages": [{"content": [], "tool_calls": [{}] * 8191}]},
        {"messages": [{"content": [{}], "tool_calls": [{}] * 8191}]},
        "messages: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of a document": (
        {"documents": ["a"] * 9000, "data_1": {"content": [{}] * 8192}},
        {"data_1": {"content": [{}] * 8193}},
        "data_1: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of documents": (
        {"documents": [{"content": [{}] * 8191}]},
        {"documents": ["a", {"content": [{}] * 8192}]},
        "documents: at most 8192 messages and parts of them (got 8193)",
    ),
    "parts of a system prompt": (
        {"system": [{}] * 8192},
        {"system": [{}] * 8193},
        "system: at most 8192 messages and parts of them (got 8193)",
    ),
    "count of tools": (
        {"tools": [{}] * 1024},
        {"tools": [{}] * 1025},
        "tools: at most 1024 (got 1025)",
    ),
    "levels": (
        {"chat_template_kwargs": deep(200), "prompt": "[" * 300},
        {"chat_template_kwargs": deep(201)},
        "chat_template_kwargs: objects and lists may nest at most 200 levels",
    ),
    "levels of a schema, which is not measured": (
        {"prompt": "x"},
        {"structured_outputs": {"json": deep(300)}},
        "structured_outputs: objects and lists may nest at most 200 levels",
    ),
    "levels of the arguments of a call": (
        {"messages": [call_of("[" * 195 + "]" * 195), call_of(FLAT), call_of("{" * 300)]},
        {"messages": [call_of("[" * 196 + "]" * 196)]},
        "messages: objects and lists may nest at most 200 levels",
    ),
    "levels of arguments, more than Python reads": (
        {"input": [{"arguments": "[" * 198 + "]" * 198}]},
        {"input": [{"arguments": "[" * 5000 + "]" * 5000}]},
        "input: objects and lists may nest at most 200 levels, those in the arguments of tool",
    ),
    "values of a field, beside token ids": (
        {"prompt": [0] * 100_000, "vllm_xargs": {"a": [[1] * 40_000, ["x"] * 32_765]}},
        {"vllm_xargs": {"a": [[1] * 40_000, ["x"] * 32_765], "b": 1}},
        "vllm_xargs: at most 32768 values beside token ids",
    ),
    "a constraint that is a text": (
        {"structured_outputs": None},
        {"structured_outputs": "NaN"},
        "structured_outputs: expected an object with one of json, regex",
    ),
    "a constraint that is a list": (
        {"structured_outputs": {}},
        {"structured_outputs": []},
        "structured_outputs: expected an object with one of json, regex",
    ),
    "numbers where no token ids are": (
        {"include": [1] * 32_768},
        {"include": [1] * 32_769},
        "include: at most 32768 values beside token ids",
    ),
    "token ids that are none": (
        {"prompt": [-1] * 32_768},
        {"prompt": [1] * 70_000 + [-1]},
        "prompt: at most 32768 values beside token ids",
    ),
    "token ids and others": (
        {"token_ids": [True] * 32_768},
        {"token_ids": [1] * 70_000 + [True]},
        "token_ids: at most 32768 values beside token ids",
    ),
    "fields": (
        {f"f{number}": 1 for number in range(1024)},
        {f"f{number}": 1 for number in range(1025)},
        "parameters.: at most 1024 fields",
    ),
    "tokens": (
        {"tokens": [1] * 6},
        {"tokens": [1] * 7},
        "tokens: at most 6 (LMI_MAX_TOKENIZE_LENGTH) (got 7)",
    ),
    "repetition_detection": (
        {"repetition_detection": {"max_pattern_size": 128}},
        {"repetition_detection": {"max_pattern_size": 129}},
        "repetition_detection.max_pattern_size: at most 128 tokens (got 129)",
    ),
    "token ids of a template": (
        {"chat_template_kwargs": {"tokenize": False, "padding": None, "enable_thinking": True}},
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize: not allowed",
    ),
    "padding of a template": (
        {"chat_template_kwargs": {"a": 1}},
        {"chat_template_kwargs": {"max_length": 1_000_000_000, "padding": "max_length"}},
        "chat_template_kwargs.padding: not allowed",
    ),
    "arguments of a template's tokenizer": (
        {},
        {"chat_template_kwargs": {"tokenizer_kwargs": {"padding": True}}},
        "chat_template_kwargs.tokenizer_kwargs: not allowed",
    ),
    "numbers as text, which vLLM reads as numbers": (
        {"n": "4", "best_of": "x"},
        {"n": " 5 "},
        "n: at most 4",
    ),
    "wrong types are left to others": (
        {"n": "x", "stop": {"a": 1}, "logit_bias": 5, "tools": 7, "text": "x", "best_of": True},
        {"n": 5.0},
        "n: at most 4",
    ),
}


@pytest.mark.parametrize(("passes", "refused", "text"), BOUNDS.values(), ids=BOUNDS)
def test_limits_bound_fields_that_multiply_work(
    passes: dict[str, Any], refused: dict[str, Any], text: str
) -> None:
    """Each bound is exact and its refusal names field, bound, setting and what came."""
    check_limits(passes, LIMITS)
    with pytest.raises(PayloadError) as caught:
        check_limits(refused, LIMITS, "parameters.")
    assert str(caught.value).startswith("parameters.")
    assert text in str(caught.value)


LOGPROBS: dict[str, tuple[dict[str, Any], int]] = {
    "logprobs": ({"logprobs": 21}, 20),
    "negative": ({"logprobs": -1}, -1),
    "prompt_logprobs": ({"prompt_logprobs": 6}, 5),
    "top_n_tokens": ({"top_n_tokens": 1}, 0),
}


ALL_TOOLS: dict[str, tuple[list[Any], list[Any], str]] = {
    "bytes": ([{"a": "b" * 990}] * 1000, [{"a": "b" * 1100}] * 1000, "at most 1048576 bytes"),
    "values": ([{"a": ["b"] * 100}] * 1000, [{"a": ["b"] * 150}] * 1000, "at most 131072 values"),
}


@pytest.mark.parametrize(("few", "many", "text"), ALL_TOOLS.values(), ids=ALL_TOOLS)
def test_all_tools_together_have_a_bound(few: list[Any], many: list[Any], text: str) -> None:
    """1,000 tools of 300 properties held the event loop for 1.6 s; one alone may have many."""
    limits = replace(LIMITS, max_grammar_size=1 << 20)
    check_limits({"tools": few}, limits)
    with pytest.raises(PayloadError, match=f"tools: {text}"):
        check_limits({"tools": many}, limits)
    tool = {"function": {"parameters": {"enum": ["x"] * 30_000}}}
    check_limits({"tools": [tool] * 4}, limits)
    with pytest.raises(PayloadError, match="items: at most 32768 values"):
        check_limits({"items": [tool] * 4}, LIMITS)


@pytest.mark.parametrize(("given", "most"), LOGPROBS.values(), ids=LOGPROBS)
def test_limits_of_logprobs_are_the_engine_s(given: dict[str, Any], most: int) -> None:
    """max_logprobs is an engine argument; -1 there is no limit."""
    with pytest.raises(PayloadError, match=rf"^parameters\.{next(iter(given))}: expected 0 to"):
        check_logprobs(given, RequestLimits(max_logprobs=most))
    check_logprobs({"logprobs": 1000}, RequestLimits(max_logprobs=-1))
    check_logprobs({"logprobs": False, "top_n_tokens": None}, RequestLimits(max_logprobs=0))


COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "one prompt": ({"prompt": "x"}, 1),
    "one prompt, n": ({"prompt": "x", "n": 4}, 1),
    "token ids": ({"prompt": [5, 6, 7]}, 1),
    "prompts": ({"prompt": ["a", "b", "c"]}, 3),
    "prompts of token ids": ({"prompt": [[1], [2, 3]]}, 2),
    "prompts, n": ({"prompt": ["a", "b"], "n": 3}, 6),
    "chat": ({"messages": [{}, {}, {}]}, 1),
    "embeddings": ({"input": ["a", "b"]}, 2),
    "rerank": ({"query": "q", "documents": ["a", "b", "c"]}, 3),
    "score": ({"text_1": "a", "text_2": ["b", "c"]}, 2),
    "Cohere's texts": ({"texts": ["a", "b", "c"]}, 3),
    "Cohere's images": ({"images": ["data:a", "data:b"]}, 2),
    "Cohere's inputs": ({"inputs": [{"content": []}, {"content": []}]}, 2),
    "conversations": ({"messages": [[{}, {}], [{}], [{}]]}, 3),
    "nothing of a list": ({"prompt": []}, 1),
    "nonsense": ({"prompt": ["a", "b"], "n": "x"}, 2),
    "negative n": ({"prompt": ["a", "b"], "n": -3}, 2),
}


@pytest.mark.parametrize(("body", "count"), COUNTS.values(), ids=COUNTS)
def test_limits_each_sequence_of_a_list_counts(body: dict[str, Any], count: int) -> None:
    """A list stands for as many requests as it asks for sequences."""
    assert sequence_count(body) == count


def test_limits_of_logprobs_are_exact() -> None:
    """None is a number of them; beams take half of what the engine gives, rounded down."""
    check_logprobs({"logprobs": 0, "num_beams": 2}, RequestLimits(max_logprobs=5))
    with pytest.raises(PayloadError, match="num_beams: at most 2, half of max_logprobs"):
        check_logprobs({"num_beams": 3}, RequestLimits(max_logprobs=5))


def test_short_repetitions_are_looked_for() -> None:
    """The bound is one from above."""
    check_limits({"repetition_detection": {"max_pattern_size": 1}}, LIMITS)


def test_values_of_a_body_are_counted_exactly() -> None:
    """A comma more is too many; a long text has few."""
    assert MAX_BODY_VALUES == 1_048_576
    check_values(b"," * MAX_BODY_VALUES + b"x")
    check_values(b"x" * (2 * MAX_BODY_VALUES))
    with pytest.raises(PayloadError, match="more than 1048576 values"):
        check_values(b"," * (MAX_BODY_VALUES + 1))


@pytest.mark.parametrize(
    "given",
    [
        {"structured_outputs": {"x": "\ud800"}},
        {"response_format": {"x": "\ud800"}},
        {"tools": [{"role": "\ud800"}]},
    ],
)
def test_half_of_a_character_in_a_grammar_is_left_to_vllm(given: dict[str, Any]) -> None:
    """Its length was asked of an encoder that has none for it: 500. vLLM names the field."""
    check_limits(given, replace(LIMITS, max_grammar_size=100))
    with pytest.raises(PayloadError, match="at most 3 bytes"):
        check_limits(given, replace(LIMITS, max_grammar_size=3))
