"""What multiplies work is refused on every route, in its own shape, before the engine sees it."""

import io
import json
from typing import Any

import pytest

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.request.body import MAX_BODY_VALUES
from lmi_vllm.messages import RequestLimits, ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import queue_of

LIMITS = RequestLimits(max_sequences=2, max_stop_strings=1, max_logit_bias=1, max_grammar_size=30)
PROFILE = ServingProfile(model_name="demo", limits=LIMITS)
JSON = {"Content-Type": "application/json"}
LONG = {"regex": "a" * 40}
DEEP = json.loads('{"a":' * 300 + "1" + "}" * 300)

TOO_MUCH: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "n": ("/invocations", {"inputs": "x", "parameters": {"n": 3}}, 424, "parameters.n: at most 2"),
    "wrong values, each of which would have an error": (
        "/invocations",
        {"inputs": "x", "parameters": {"allowed_token_ids": ["a"] * 5}},
        424,
        "parameters.allowed_token_ids: at most 1 entries",
    ),
    "stop": (
        "/invocations",
        {"inputs": "x", "parameters": {"stop": ["a", "b"]}},
        424,
        "LMI_MAX_STOP_STRINGS",
    ),
    "id": (
        "/v1/completions",
        {"prompt": "x", "request_id": "i" * 8191},
        400,
        "request_id: at most 8190 characters (got 8191)",
    ),
    "openai n": ("/v1/completions", {"prompt": "x", "n": 3}, 400, "n: at most 2"),
    "openai on /invocations": ("/invocations", {"prompt": "x", "n": 3}, 424, "n: at most 2"),
    "chat grammar": (
        "/v1/chat/completions",
        {"messages": [], "structured_outputs": LONG},
        400,
        "LMI_MAX_GRAMMAR_SIZE",
    ),
    "chat tools": (
        "/v1/chat/completions",
        {"messages": [], "tools": [{"function": {"parameters": LONG}}]},
        400,
        "tools[0]: at most 30 bytes",
    ),
    "deep tools": (
        "/v1/chat/completions",
        {"messages": [], "tools": [DEEP]},
        400,
        "tools: objects and lists may nest at most 200 levels",
    ),
    "deep grammar": (
        "/invocations",
        {"inputs": "x", "parameters": {"guided_json": DEEP}},
        424,
        "parameters.guided_json: objects and lists may nest at most 200 levels",
    ),
    "deep arguments": (
        "/v1/chat/completions",
        {"messages": [{"tool_calls": [{"function": {"arguments": "[" * 5000 + "]" * 5000}}]}]},
        400,
        "messages: objects and lists may nest at most 200 levels",
    ),
    "logit_bias": (
        "/v1/completions",
        {"prompt": "x", "logit_bias": {"1": 1, "2": 1}},
        400,
        "LMI_MAX_LOGIT_BIAS",
    ),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 400, "4 sequences"),
    "inputs": (
        "/invocations",
        {"inputs": ["a", "b"], "parameters": {"n": 2, "do_sample": True}},
        424,
        "4 sequences; job_queue_size allows 3",
    ),
}


@pytest.mark.parametrize(("path", "body", "status", "text"), TOO_MUCH.values(), ids=TOO_MUCH)
async def test_limits_are_those_of_every_route(
    serve: ServeScripted,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    status: int,
    text: str,
) -> None:
    """The refusal names the bound; nothing reached the engine and no place is held."""
    client = await serve(PROFILE, limit=3)
    response = await client.post(path, json=body)
    assert response.status == status
    assert text in await response.text()
    assert not engine.jobs
    assert not engine.calls
    assert queue_of(client).in_flight == 0


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions", "/tokenize", "/v1/rerank"])
async def test_a_body_of_too_many_values_is_not_read(
    serve: ServeScripted, engine: ScriptedEngine, path: str
) -> None:
    """Millions of token ids would be objects, one by one, before anything could refuse them."""
    client = await serve(limit=3)
    body = io.BytesIO(b'{"prompt": [' + b"5," * (MAX_BODY_VALUES + 1) + b"5]}")
    response = await client.post(path, data=body, headers=JSON)
    assert response.status in (400, 424)
    assert f"the body has more than {MAX_BODY_VALUES} values" in await response.text()
    assert not engine.calls
    assert queue_of(client).in_flight == 0
    text = io.BytesIO(b'{"inputs": "' + b"a" * (2 * MAX_BODY_VALUES) + b'"}')
    assert (await client.post("/invocations", data=text, headers=JSON)).status == 200


async def test_limits_admit_a_list_that_fits_the_queue(serve: ServeScripted) -> None:
    """Three sequences fit a queue of three; one prompt with n fits a queue of one."""
    client = await serve(PROFILE, limit=3)
    response = await client.post("/invocations", json={"inputs": ["a", "b", "c"]})
    assert response.status == 200
    client = await serve(PROFILE, limit=1)
    assert (await client.post("/v1/completions", json={"prompt": "x", "n": 2})).status == 200
