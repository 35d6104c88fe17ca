"""Checks of what is answered: the README's requests, adapters, log probabilities, structure."""

import asyncio
import concurrent.futures
import json
import math

from integration import storm
from integration.client import call
from integration.gpu.suite import PROMPT, Suite, answer, text_of

CAPITAL = " Paris. The city lies on the river Seine."
ADAPTERS = ("json", "capitals")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}


def readme_requests(suite: Suite) -> str:
    """The README's answers, word for word: the embedded model is float32."""
    url = suite.demo()
    assert text_of(url, "The capital of France is", tokens=30) == CAPITAL
    stream = {"inputs": "The moon is", "stream": True}
    stream["parameters"] = {"max_new_tokens": 3, "logprobs": False}
    rows = call(url, "/invocations", stream).lines()
    assert [row["token"]["text"] for row in rows] == [" a", " b", "all"], rows
    chat = {
        "model": "json", "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }  # fmt: skip
    said = answer(url, chat, "/v1/chat/completions")["choices"][0]["message"]["content"]
    assert json.loads(said) == {"answer": "The capital of France is Paris."}, said
    return "LMI, a stream, OpenAI's chat over an adapter"


def adapters_in_one_batch(suite: Suite) -> str:
    """Adapters come and go under load, and no answer is that of another one or of the base."""
    seconds, is_exact = suite.storm_seconds, not suite.machine.has_gpu
    with suite.server("--demo", **storm.OPTIONS) as (_, url):
        found = asyncio.run(storm.rage(url, seconds, seed=24, is_exact=is_exact))
    assert not found.wrong, found.wrong[:3]
    checked, rounded = found.counts["checked"], found.counts["rounded otherwise"]
    assert checked > 9 * rounded, f"{rounded} answers were rounded otherwise, {checked} were not"
    return (
        f"{seconds:g} s, {checked} answers, each that of its own weights"
        f"{f'; {rounded} more go on otherwise after a beginning of theirs' if rounded else ''}"
    )


def base_beside_adapters(suite: Suite) -> str:
    """Base rows in a batch with adapters are what they are alone."""
    url = suite.demo()
    alone = {name: text_of(url, adapter=name) for name in ("", *ADAPTERS)}
    assert len(set(alone.values())) == len(alone), alone
    asked = ("", *ADAPTERS) * 8
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda name: text_of(url, adapter=name), asked))
    same = sum(text == alone[name] for name, text in zip(asked, together, strict=True))
    if suite.machine.has_gpu:  # whose kernels round by the size of the batch
        texts = {name: {PROMPT: text} for name, text in alone.items()}
        found = [storm.nearest(texts, PROMPT, text) for text in together]
        assert found == [{name} for name in asked], together
    else:
        assert same == len(asked), together
    return f"{len(asked)} requests at once, {len(alone)} kinds of rows, {same} word for word"


def log_probabilities(suite: Suite) -> str:
    """Of each token, the same streamed and not, never above zero; the greedy one is the best."""
    payload = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True}}
    url = suite.demo()
    told = answer(url, payload)["details"]["tokens"]
    rows = call(url, "/invocations", payload | {"stream": True}).lines()
    best = answer(
        url,
        {"model": "lmi", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 3},
        "/v1/completions",
    )["choices"][0]["logprobs"]
    whole = [token["log_prob"] for token in told]
    streamed = [row["token"]["log_prob"] for row in rows]
    assert len(whole) == len(streamed) == 8
    assert all(value <= 0 and math.isfinite(value) for value in whole), whole
    assert max(abs(a - b) for a, b in zip(whole, streamed, strict=True)) < 1e-3
    for mine, top in zip(best["token_logprobs"], best["top_logprobs"], strict=True):
        assert mine >= max(top.values()) - 1e-6
    return f"8 tokens, the least probable {min(whole):.4f}"


def structured_output(suite: Suite) -> str:
    """A JSON schema holds."""
    payload = {
        "model": "lmi", "max_tokens": 64, "temperature": 0,
        "messages": [{"role": "user", "content": "Name a city."}],
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA},
        },
    }  # fmt: skip
    url = suite.demo()
    said = answer(url, payload, "/v1/chat/completions")["choices"][0]["message"]["content"]
    found = json.loads(said)
    assert set(found) == {"city", "size"}, found
    assert found["size"] in ("small", "large")
    return said[:80]
