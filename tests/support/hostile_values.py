"""Values of request fields that an engine must survive: each is a row of a test on each engine."""

from collections.abc import Iterator
from typing import Any

HUGE = 2**70
DIGITS = {"regex": "[0-9]{3}"}
# Of `sampling_params`; vLLM's other routes check many of them before.
SAMPLING: dict[str, list[Any]] = {
    "logit_bias": [{"5": 1e300}, {"5": -1e300}, {"5": float("nan")}, {"5": 1e39}, {"9999": 1}],
    "repetition_penalty": [1e300, 1e-300, 5e-324],
    "seed": [2**63, 2**64, -(2**63) - 1, HUGE],
    "min_tokens": [4, HUGE],
    "max_tokens": [2**62, HUGE],
    "top_k": [2**40, HUGE],
    "n": [HUGE, 0, -1],
    "temperature": [1e-300, 1e300],
    "top_p": [1e-300],
    "min_p": [1],
    "thinking_token_budget": [0, 2**62, HUGE],
    "stream_interval": [2**62, HUGE],
    "bad_words": [[""], ["\x00"], ["\ud800"]],
    "stop": [["\ud800"], ["\x00"]],
    "allowed_token_ids": [[HUGE], [-1], []],
    "stop_token_ids": [[HUGE], [-1]],
    "logprob_token_ids": [[HUGE], [-1]],
    "prompt_logprob_token_ids": [[[HUGE]], [[1], [2]]],
    "prompt_logprobs": [HUGE, -1],
    "logprobs": [HUGE, -1],
    "trace_decode_token_ids": [[1], [HUGE]],
    "routed_experts_prompt_start": [1, HUGE, -1],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": HUGE}],
    "extra_args": [
        {"kv_transfer_params": "x"}, {"kv_transfer_params": 5}, {"ec_transfer_params": [1]},
        {"kv_cache_report_mode": {"a": 1}}, {"x": HUGE}, {"x": "\ud800"}, {"5": None},
    ],
    "structured_outputs": [
        {"structural_tag": '{"type": "structural_tag", "format": {"type": "x"}}'},
        {"structural_tag": "5"}, {"regex": "\ud800"}, {"choice": [""]}, {"regex": ""},
        {"json": {"$ref": "#"}}, {"json": {"$ref": "#/a"}}, {"json": {"enum": []}},
        {"regex": "a", "whitespace_pattern": "("}, {"json": {}, "whitespace_pattern": "("},
        {"grammar": "root ::= root"}, {"json": {"pattern": "(", "type": "string"}},
    ],
}  # fmt: skip
# Each is allowed alone; together they make numbers that are no numbers.
COMBINED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1e-37, "temperature": 0.01, "logit_bias": {"7": 15.0}},
    {"repetition_penalty": 1e-300, "temperature": 1e-5, "logit_bias": {"7": 100.0}},
    {"temperature": 1e-5, "top_p": 1e-300, "top_k": 1, "min_p": 1},
    {"temperature": 1e300, "top_p": 1e-300},
    {"temperature": 1e-4, "frequency_penalty": -2, "presence_penalty": -2, "min_tokens": 3},
    {"temperature": 1.0, "allowed_token_ids": [5], "bad_words": ["a"], "logit_bias": {"5": -100}},
    {"seed": 2**63 - 1, "n": 2, "temperature": 1.0},
    {"seed": -(2**63), "n": 2, "temperature": 1.0},
)
XARGS = ({"kv_transfer_params": "x"}, {"x": HUGE}, {"x": [HUGE]}, {"x": "\ud800"})
CONSTRAINTS = (
    {"regex": 5}, {"choice": [1]}, {"_backend": "x", **DIGITS}, {"json_object": 1},
    {"json": {}, "disable_any_whitespace": "x"}, {"json": [1]}, {"x": 1},
)  # fmt: skip
# Numbers of more than 64 bits, and halves of a character: neither can be sent to the engine.
WORDS: dict[str, Any] = {
    "top_k": HUGE, "session_id": "\ud800", "tools": [{"role": "\ud800"}],
    "response_format": {"type": "json_object", "x": "\ud800"}, "structured_outputs": "\ud800",
}  # fmt: skip
EXTREMES = {"seed": 2**63 - 1, "priority": 2**31 - 1, "max_new_tokens": HUGE}


def hostile_bodies() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a name and the bodies for completions that have its values."""
    common = {"prompt": "x", "max_tokens": 4}
    for name, values in SAMPLING.items():
        yield name, [{**common, name: one} for one in values]
    yield "combined", [{**common, **one} for one in COMBINED]
    yield "vllm_xargs", [{**common, "vllm_xargs": one} for one in XARGS]
    yield "constraints", [{**common, "structured_outputs": one} for one in CONSTRAINTS]
    for name, one in WORDS.items():
        yield f"{name}, wide", [{**common, name: one}]
