"""Tokens in, tokens out (`skip_tokenizer_init`, `--tokens-only`): no text is needed or made."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
from prometheus_client import REGISTRY

from lmi_vllm.engine.base import Engine
from lmi_vllm.errors import LmiError, PayloadError
from lmi_vllm.messages import GenerationJob, OpenAICall
from lmi_vllm.server.warm_up import warm_up
from tests.contract.conftest import NO_ADAPTERS, LoopThread, collect, start_demo_engine

pytestmark = pytest.mark.vllm
IDS: Final = (0, 317, 84, 808)
COUNTED: Final = ("_total", "_count", "_sum", "_bucket")


@pytest.fixture(scope="module")
def engine(run: LoopThread) -> Iterator[Engine]:
    """Give a running engine over the embedded model, without its tokenizer."""
    engine = start_demo_engine(run, skip_tokenizer_init=True, **NO_ADAPTERS)
    yield engine
    run(engine.close())


def counted() -> dict[str, float]:
    """Return all that vLLM has counted in this process."""
    return {
        f"{one.name}{one.labels}": one.value
        for family in REGISTRY.collect()
        for one in family.samples
        if one.name.startswith("vllm:") and one.name.endswith(COUNTED) and one.value
    }


async def warmed(engine: Engine) -> None:
    """Warm the engine up as a start does."""
    with engine.uncounted():
        await warm_up(engine, has_top_logprobs=True)


def test_warm_up_needs_no_text_and_is_not_counted(run: LoopThread, engine: Engine) -> None:
    """It answers for real, and vLLM's own metrics begin with the first request of a client."""
    before = counted()
    run(warmed(engine))
    assert counted() == before
    run(collect(engine, GenerationJob("own", "", {"max_tokens": 2}, prompt_ids=IDS)))
    after = counted()
    assert after != before
    assert any("request_success" in name for name in after)


def test_a_probe_hides_no_request_beside_it(run: LoopThread, engine: Engine) -> None:
    """Requests that come while the server asks the engine itself are counted, and they alone."""

    async def beside(steps: int) -> None:
        probing = asyncio.create_task(warmed(engine))
        for _ in range(steps):
            await asyncio.sleep(0.002)
        await collect(engine, GenerationJob("own", "", {"max_tokens": 2}, prompt_ids=IDS))
        await probing

    def successes() -> float:
        return sum(value for name, value in counted().items() if "request_success_total" in name)

    before = successes()
    for steps in range(6):
        run(beside(steps))
    assert successes() == before + 6


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "streamed"])
def test_tokens_are_answered_with_tokens(
    run: LoopThread, engine: Engine, vllm_engine: Engine, is_streaming: bool
) -> None:
    """The same ones as with a tokenizer."""
    sampling = {"max_tokens": 9, "temperature": 0.0, "logprobs": 2}
    job = GenerationJob("tokens", "", sampling, is_streaming=is_streaming, prompt_ids=IDS)
    found = [token for chunk in run(collect(engine, job)) for token in chunk.tokens]
    body = {"model": "lmi", "prompt": list(IDS), "return_token_ids": True, **sampling}
    reply = run(vllm_engine.answer_openai(OpenAICall("completions", body, {}, "expected")))
    (choice,) = json.loads(reply.body)["choices"]
    assert [token.id for token in found] == choice["token_ids"]
    assert {token.text for token in found} == {""}


CHAT: Final = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
REFUSED: Final[dict[str, dict[str, Any]]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": "x", "max_tokens": 4},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_texts_are_refused_as_faults_of_the_client(
    run: LoopThread, engine: Engine, kind: str
) -> None:
    """And say what the server has not; tokens are answered beside them."""
    body = {"model": "lmi", **REFUSED[kind]}
    reply = run(engine.answer_openai(OpenAICall(kind, body, {}, "refused")))
    assert reply.status == 400
    assert "okenizer" in json.loads(reply.body)["error"]["message"]
    with pytest.raises(LmiError, match="Tokenizer not available") as refusal:
        run(collect(engine, GenerationJob("text", "x", {"max_tokens": 4})))
    assert refusal.type is PayloadError
    asked = {"model": "lmi", "prompt": list(IDS), "max_tokens": 2}
    assert run(engine.answer_openai(OpenAICall("completions", asked, {}, "ids"))).status == 200
