"""No request makes the event loop stand still, and options of media are not a client's.

`STILL_SECONDS` is what SECURITY.md promises. It is processor time of the loop's thread: the time on
the clock of a busy machine says little, and it is measured against work that takes as long.
"""

import asyncio
import time
from typing import Any

import orjson
import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import Dialect
from lmi_vllm.inference.request.body import MAX_BODY_VALUES
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread
from tests.contract.test_bridge import http_call
from tests.support.slowdown import processor_slowdown, slowdown

pytestmark = pytest.mark.vllm

BOUND = 512 << 10
TRIES = 3  # a busy machine lets the loop wait, too, but not each time
TEXT = "a " * 2_500_000
CHAT = [{"role": "user", "content": TEXT}]
# Each route that takes text; those that serve a model's context are bounded by vLLM.
LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompt": ("/tokenize", {"prompt": TEXT}, "LMI_MAX_TOKENIZE_LENGTH"),
    "texts of tokens": (
        "/tokenize",
        {"prompt": TEXT, "return_token_strs": True},
        "LMI_MAX_TOKENIZE_LENGTH",
    ),
    "messages": ("/tokenize", {"messages": CHAT}, "LMI_MAX_TOKENIZE_LENGTH"),
    "tokens": ("/detokenize", {"tokens": [5] * (BOUND + 1)}, "LMI_MAX_TOKENIZE_LENGTH"),
    "completions": ("/v1/completions", {"prompt": TEXT}, "maximum context length"),
    "chat": ("/v1/chat/completions", {"messages": CHAT}, "maximum context length"),
    "token ids": ("/v1/completions", {"prompt": [5] * MAX_BODY_VALUES}, "maximum context length"),
    "responses": ("/v1/responses", {"input": TEXT}, "maximum context length"),
    "anthropic": (
        "/v1/messages",
        {"model": "lmi", "messages": CHAT, "max_tokens": 1},
        "maximum context length",
    ),
    "count of tokens": (
        "/v1/messages/count_tokens",
        {"model": "lmi", "messages": CHAT},
        "maximum context length",
    ),
}


STILL_SECONDS = 0.3
IDS = [5 + number % 700 for number in range(780)]
ROW = {"type": "integer", "minimum": 0}
SCHEMA = {
    "type": "object",
    "properties": {f"p{i}": ROW | {"maximum": 10**9 + i} for i in range(400)},
}
# What held the event loop, each for longer than that.
STALLING: dict[str, tuple[str, dict[str, Any], int]] = {
    "prompts of emoji": ("/v1/completions", {"prompt": ["\U0001f600" * 990] * 500}, 400),
    "prompts of ids": ("/v1/completions", {"prompt": [IDS] * 600}, 200),
    "log probabilities": ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 20}, 200),
    "echoed ones": ("/v1/completions", {"prompt": IDS, "logprobs": 20, "echo": True}, 200),
    "too many of them": ("/v1/completions", {"prompt": IDS + IDS, "prompt_logprobs": 20}, 400),
    "too many together": ("/v1/completions", {"prompt": [IDS] * 40, "prompt_logprobs": 20}, 400),
    "for each answer": (
        "/v1/completions",
        {"prompt": IDS, "prompt_logprobs": 20, "n": 4, "temperature": 1.0},
        400,
    ),
    "a schema": ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": SCHEMA}}, 200),
    "truncated": ("/v1/completions", {"prompt": TEXT, "truncate_prompt_tokens": 5}, 200),
    "truncated on the left": (
        "/v1/completions",
        {"prompt": TEXT, "truncate_prompt_tokens": 5, "truncation_side": "left"},
        200,
    ),
    "a truncated chat": (
        "/v1/chat/completions",
        {"messages": CHAT, "truncate_prompt_tokens": -1},
        200,
    ),
    "truncated by itself": ("/v1/responses", {"input": TEXT, "truncation": "auto"}, 200),
}


async def processor_time(work: Any) -> tuple[Any, float]:
    """Return what `work` gives, and the most processor time that the loop took without a pause."""
    enter_record(RequestRecord("id", "POST", "/", "/", "192.0.2.1", Dialect.OPENAI))
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.thread_time()
        await asyncio.sleep(0.001)
        longest = max(longest, time.thread_time() - before)
    return await task, longest


@pytest.mark.parametrize(("path", "body", "status"), STALLING.values(), ids=STALLING)
def test_no_request_stalls_the_event_loop(
    run: LoopThread, vllm_engine: Engine, path: str, body: dict[str, Any], status: int
) -> None:
    """Whatever it asks for, others' requests and tokens go on."""
    assert vllm_engine.http is not None
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    call = http_call(path, {most: 1 if most == "max_tokens" else 16, **body})
    for _ in range(TRIES):
        reply, still = run(processor_time(vllm_engine.http.call(call)))
        assert reply.status == status, reply.body[:500]
        if status == 400 and "prompt_logprobs" in body:
            assert b"LMI_MAX_PROMPT_LOGPROBS" in reply.body
        if still < (most_seconds := STILL_SECONDS * processor_slowdown()):
            break
    assert still < most_seconds


def test_known_schema_is_not_checked_again(run: LoopThread, vllm_engine: Engine) -> None:
    """The check of 700 such numbers took 0.2 s of the loop at every request."""
    assert vllm_engine.http is not None
    body = {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": SCHEMA}}
    run(vllm_engine.http.call(http_call("/v1/completions", body)))
    reply, still = run(processor_time(vllm_engine.http.call(http_call("/v1/completions", body))))
    assert reply.status == 200
    assert still < 0.03


def test_truncated_text_has_the_tokens_of_the_whole(run: LoopThread, vllm_engine: Engine) -> None:
    """At either side: only how much is read is another."""
    assert vllm_engine.http is not None
    words = " ".join(f"{number} moons" for number in range(9000))
    reply = run(vllm_engine.http.call(http_call("/tokenize", {"prompt": words})))
    ids = orjson.loads(reply.body)["tokens"]
    tokenizer: Any = vllm_engine.tokenizer
    usual = tokenizer(words, truncation=True, max_length=40)["input_ids"]
    for side, kept in (("left", ids[-40:]), ("right", ids[:40]), (None, usual)):
        body = {"prompt": words, "max_tokens": 1, "return_token_ids": True,
                "truncate_prompt_tokens": 40, "truncation_side": side}  # fmt: skip
        reply = run(vllm_engine.http.call(http_call("/v1/completions", body)))
        found = orjson.loads(reply.body)["choices"][0]["prompt_token_ids"]
        assert found == kept


async def longest_pause(work: Any) -> tuple[Any, float]:
    """Return what `work` gives, and for how long the event loop stood still meanwhile."""
    task, longest = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(0.002)
        longest = max(longest, time.perf_counter() - before)
    return await task, longest


@pytest.mark.parametrize(("path", "body", "reason"), LONG.values(), ids=LONG)
def test_long_text_is_refused_before_it_is_converted(
    run: LoopThread, vllm_engine: Engine, path: str, body: dict[str, Any], reason: str
) -> None:
    """5 MB: nothing tokenizes them, and the event loop goes on."""
    assert vllm_engine.http is not None
    for _ in range(TRIES):
        reply, pause = run(longest_pause(vllm_engine.http.call(http_call(path, body))))
        assert (reply.status, reason in reply.body.decode()) == (400, True)
        if pause < (longest := 0.5 * slowdown()):
            break
    assert pause < longest


def test_text_as_long_as_allowed_is_converted(run: LoopThread, vllm_engine: Engine) -> None:
    """Longer than the model's context: that is what these routes are for."""
    assert vllm_engine.http is not None
    body = {"prompt": "a " * 8192}
    reply = run(vllm_engine.http.call(http_call("/tokenize", body)))
    assert reply.status == 200
    assert b'"max_model_len":2048' in reply.body


OPTIONS: dict[str, dict[str, Any]] = {
    "media_io_kwargs": {"video": {"num_frames": -1}},
    "mm_processor_kwargs": {"size": {"longest_edge": 1 << 20}},
}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("path", ROUTES)
def test_media_options_of_a_request_are_refused(
    run: LoopThread, vllm_engine: Engine, path: str, name: str
) -> None:
    """They say how much is decoded: refused unless the operator set trust_request_mm_kwargs."""
    assert vllm_engine.http is not None
    body = {**ROUTES[path], name: OPTIONS[name]}
    reply = run(vllm_engine.http.call(http_call(path, body)))
    assert (reply.status, b"trust-request-mm-kwargs" in reply.body) == (400, True)
