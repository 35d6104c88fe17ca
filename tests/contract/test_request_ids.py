"""Clients choose the ids of requests, and may choose the same: none of them ends another's.

vLLM ends every request with the id that it is given. `X-Request-Id` and `request_id` are such ids.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.errors import RequestError
from lmi_vllm.messages import GenerationJob, HttpCall, OpenAICall
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread, collect

pytestmark = pytest.mark.vllm

ID = "order-17"
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
UNSENDABLE = 2**70


def as_request(*, is_inference: bool = True) -> None:
    """Let what follows in this task be a request of its own."""
    record = RequestRecord(ID, "POST", "/x", "/x", "-", "openai")
    record.is_inference = is_inference
    enter_record(record)


async def chat(engine: Any, **fields: Any) -> Any:
    """A chat on the lane of vLLM's handlers, of the request that its task belongs to."""
    body = {"messages": MESSAGES, **fields}
    return await engine.answer_openai(OpenAICall("chat/completions", body, {}, ID))


async def other_chat(engine: Any, **fields: Any) -> Any:
    """A chat that is a request of its own."""
    as_request()
    return await chat(engine, **fields)


async def other(engine: Any, path: str, **fields: Any) -> Any:
    """A request of the engine's HTTP application."""
    as_request()
    headers = [(b"content-type", b"application/json")]
    body = json.dumps({"model": "lmi", "messages": MESSAGES, **fields}).encode()
    return await engine.http.call(HttpCall("POST", path, "", headers, body, ID))


async def job(engine: Any, **sampling: Any) -> Any:
    """A job of LMI's lane, whose id is the same inside vLLM."""
    as_request()
    return await collect(engine, GenerationJob(f"chatcmpl-{ID}", "x", sampling))


async def abort(engine: Any) -> None:
    """What vLLM's handlers of transcriptions do when one of theirs is cut off."""
    as_request()
    await engine._llm.abort([f"chatcmpl-{ID}"])


@pytest.mark.parametrize(
    "intruder",
    [
        lambda engine: other_chat(engine, top_k=UNSENDABLE),
        lambda engine: other_chat(engine, top_k=UNSENDABLE, n=2, temperature=1),
        lambda engine: other(engine, "/v1/chat/completions", top_k=UNSENDABLE),
        lambda engine: job(engine, top_k=UNSENDABLE),
        abort,
    ],
    ids=["chat", "two answers", "application", "LMI", "an abort of vLLM's"],
)
def test_request_that_fails_ends_no_other_of_its_id(
    run: LoopThread, vllm_engine: Engine, intruder: Callable[[Any], Awaitable[Any]]
) -> None:
    """The one that runs gets its whole answer, and nothing is left of the other."""
    states = vllm_engine._llm.output_processor.request_states  # type: ignore[attr-defined]

    async def scenario() -> Any:
        running = asyncio.create_task(other_chat(vllm_engine, **LONG))
        while not states:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0.001)
        before = set(states)
        await asyncio.gather(asyncio.create_task(intruder(vllm_engine)), return_exceptions=True)
        assert set(states) == before
        return json.loads((await running).body)

    answer = run(scenario())
    assert answer["id"] == f"chatcmpl-{ID}"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == LONG["max_tokens"]


@pytest.mark.parametrize("is_inference", [True, False], ids=["its own", "a route that manages"])
def test_id_ends_what_it_may(run: LoopThread, vllm_engine: Engine, is_inference: bool) -> None:
    """A request of inference its own sequences, and a route that manages all of the id."""
    llm = vllm_engine._llm  # type: ignore[attr-defined]

    async def scenario() -> Any:
        as_request(is_inference=is_inference)
        asked = chat if is_inference else other_chat
        running = asyncio.create_task(asked(vllm_engine, **LONG))
        while not llm.output_processor.request_states:  # noqa: ASYNC110 (vLLM has no event)
            await asyncio.sleep(0.001)
        await llm.abort([f"chatcmpl-{ID}"])
        return json.loads((await running).body)["choices"][0]["finish_reason"]

    assert run(scenario()) == "abort"


def test_response_takes_no_other_s_id(
    run: LoopThread, vllm_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM would keep it in the other's place, where that one's client reads it."""
    application: HttpApplication | None = vllm_engine.http
    responses = application.app.state.openai_serving_responses  # type: ignore[union-attr]
    monkeypatch.setattr(responses, "enable_store", True)
    mine = {"request_id": "resp_mine", "input": "x", "max_output_tokens": 2}
    assert run(other(vllm_engine, "/v1/responses", **mine)).status == 200
    with pytest.raises(RequestError, match=r"^request_id: a response with this id exists"):
        run(other(vllm_engine, "/v1/responses", **mine, instructions="another client's"))
    assert run(other(vllm_engine, "/v1/responses", **mine | {"request_id": "2"})).status == 200
    for kept in (responses.response_store, responses.msg_store):
        kept.clear()
