"""Routes that only convert text have a bound, and options of media are not a client's."""

import asyncio
import time
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.inference.request.body import MAX_BODY_VALUES
from tests.contract.conftest import LoopThread
from tests.contract.test_bridge import http_call

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
        if pause < 0.5:
            break
    assert pause < 0.5


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
