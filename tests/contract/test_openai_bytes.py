"""On vLLM's routes our bytes are those of vLLM's own server over the same engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine
from lmi_vllm.messages import AdapterRef, OpenAICall
from tests.contract.conftest import DEMO_ADAPTERS, LoopThread

pytestmark = pytest.mark.vllm
USER = {"role": "user", "content": "What is the capital of France?"}
CHAT = {"messages": [USER], "temperature": 0, "max_tokens": 12}
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["sea", "moon"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"name": "s", "schema": {"enum": ["sea", "moon"]}}
IMAGE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
}
RESPONSE = {"input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 12}
CHAT_PATH, PROMPT_PATH = "/v1/chat/completions", "/v1/completions"
CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT_PATH, CHAT),
    "chat stream": ("chat/completions", CHAT_PATH, {**CHAT, "stream": True}),
    "chat stream usage": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat logprobs": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    ),
    "chat named tool": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "tools": [TOOL], "tool_choice": NAMED, "max_tokens": 40},
    ),
    "chat auto tool without parser": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "tools": [TOOL], "tool_choice": "auto"},
    ),
    "chat schema": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "chat n": ("chat/completions", CHAT_PATH, {**CHAT, "n": 2, "temperature": 1, "seed": 3}),
    "chat beam": ("chat/completions", CHAT_PATH, {**CHAT, "use_beam_search": True, "n": 2}),
    "chat image on a text model": (
        "chat/completions",
        CHAT_PATH,
        {**CHAT, "messages": [{"role": "user", "content": [IMAGE]}]},
    ),
    "chat unknown model": ("chat/completions", CHAT_PATH, {**CHAT, "model": "nobody"}),
    "chat without messages": ("chat/completions", CHAT_PATH, {}),
    "chat wrong type": ("chat/completions", CHAT_PATH, {"messages": "hello"}),
    "chat refused value": ("chat/completions", CHAT_PATH, {**CHAT, "temperature": -1}),
    "chat refused while reading": ("chat/completions", CHAT_PATH, {**CHAT, "cache_salt": ""}),
    "completion": ("completions", PROMPT_PATH, PROMPT),
    "completion stream": ("completions", PROMPT_PATH, {**PROMPT, "stream": True}),
    "completion echo logprobs": (
        "completions",
        PROMPT_PATH,
        {**PROMPT, "echo": True, "logprobs": 1},
    ),
    "completion list": ("completions", PROMPT_PATH, {**PROMPT, "prompt": ["The sea", "Rain"]}),
    "completion too long": ("completions", PROMPT_PATH, {**PROMPT, "prompt": "moon " * 5000}),
    "completion regex": (
        "completions",
        PROMPT_PATH,
        {**PROMPT, "structured_outputs": {"regex": "[0-9]{3}"}},
    ),
    "completion bad regex": (
        "completions",
        PROMPT_PATH,
        {**PROMPT, "structured_outputs": {"regex": "["}},
    ),
    "completion null": ("completions", PROMPT_PATH, {"prompt": None}),
    "tokenize": ("tokenize", "/tokenize", {"prompt": "The moon", "return_token_strs": True}),
    "tokenize chat": ("tokenize", "/tokenize", {"messages": [USER]}),
    "tokenize nothing": ("tokenize", "/tokenize", {}),
    "detokenize": ("detokenize", "/detokenize", {"tokens": [300, 301]}),
    "detokenize no token": ("detokenize", "/detokenize", {"tokens": [10**7]}),
    "detokenize text": ("detokenize", "/detokenize", {"tokens": "x"}),
    "responses": ("responses", "/v1/responses", RESPONSE),
    "responses stream": ("responses", "/v1/responses", {**RESPONSE, "stream": True}),
    "responses wrong type": ("responses", "/v1/responses", {"input": 3.5}),
    "responses unknown model": ("responses", "/v1/responses", {"input": "x", "model": "nobody"}),
}


@pytest.fixture(scope="module")
def server(run: LoopThread, vllm_engine: Engine) -> Iterator[Any]:
    """VLLM's own application over the session's engine."""
    from tests.contract.vllm_server import VllmServer  # noqa: PLC0415 (imports vLLM)

    server = run(VllmServer.over(vllm_engine))
    yield server
    run(server.client.aclose())


@pytest.mark.parametrize("name", CALLS)
def test_openai_bytes_are_vllm_s(
    run: LoopThread, vllm_engine: Engine, server: Any, name: str
) -> None:
    """Status, content type and every byte agree; only the time of day may differ."""
    from tests.contract.vllm_server import same_bytes  # noqa: PLC0415 (imports vLLM)

    kind, path, body = CALLS[name]
    ours, theirs = run(same_bytes(vllm_engine, server, kind, path, body))
    assert ours == theirs


@pytest.mark.parametrize("kind", ["embeddings", "score", "rerank", "classify", "pooling"])
def test_generating_model_has_no_pooling_route(
    run: LoopThread, vllm_engine: Engine, server: Any, kind: str
) -> None:
    """VLLM has no such path then; we answer with its status, and say why in its shape."""
    reply = run(vllm_engine.answer_openai(OpenAICall(kind, {"input": "x"}, {}, "r")))
    path = "/v1/embeddings" if kind == "embeddings" else f"/{kind}"
    status, _, _ = run(server.post(path, {"input": "x"}))
    assert reply.status == status == 404
    assert b"The model does not support" in reply.body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat/completions", {**CHAT, "stream": True}),
        ("completions", PROMPT),
        ("responses", RESPONSE),
        ("responses", {**RESPONSE, "stream": True}),
        ("tokenize", {"prompt": "The moon"}),
        ("responses", {**RESPONSE, "temperature": -1}),
    ],
)
def test_adapter_answers_under_its_own_name(
    run: LoopThread, vllm_engine: Engine, kind: str, body: dict[str, Any]
) -> None:
    """No answer shows what stands for a load of an adapter inside; a good one shows its name."""

    async def scenario() -> bytes:
        ref = AdapterRef("capitals", str(DEMO_ADAPTERS / "capitals"), 9100)
        await vllm_engine.load_adapter(ref)
        try:
            reply = await vllm_engine.answer_openai(OpenAICall(kind, body, {}, "r", adapter=ref))
            if reply.stream is None:
                return reply.body
            return b"".join([event async for event in reply.stream])
        finally:
            await vllm_engine.unload_adapter(ref)

    content = run(scenario())
    assert vllm_engine.http._secret.encode() not in content
    if kind != "tokenize" and body.get("temperature") == 0:
        assert b'"model":"capitals"' in content
