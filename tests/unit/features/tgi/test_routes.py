"""TGI's routes beside their bytes (golden files): overload, adapters, readiness, the hub client."""

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

from lmi_vllm._version import __version__
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import GatedEngine, queue_of, until
from tests.web.test_headers import check_allow
from tests.web.test_tgi_compat import ADAPTER_IDS, TGI, check_adapter


async def test_info_has_the_limits_of_requests(serve: ServeScripted) -> None:
    """GET /info has TGI 3's names; the bounds are those of our settings and the engine."""
    client = await serve(TGI)
    response = await client.get("/info")
    assert response.status == 200
    assert await response.json() == {
        "model_id": "",
        "model_sha": None,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": 1000,
        "max_best_of": 16,
        "max_stop_sequences": 64,
        "max_input_tokens": 2047,
        "max_total_tokens": 2048,
        "validation_workers": 1,
        "max_client_batch_size": 1000,
        "router": "lmi_vllm",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


@pytest.mark.parametrize(
    "path", ["/", "/generate", "/generate_stream", "/info", "/tokenize", "/chat_tokenize"]
)
async def test_allow_is_true(serve: ServeScripted, path: str) -> None:
    """No method in `Allow` is itself answered with 405; also over a route of the core."""
    await check_allow(await serve(TGI), path)


NULLS: dict[str, Any] = dict.fromkeys(("n", "stop", "logprobs", "tools", "tool_choice", "seed"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(
    ("model", "name"), [("tgi", "lmi"), ("dummy", "lmi"), ("lmi", "lmi"), ("other", "other")]
)
async def test_chats_of_tgi_s_clients_are_read_as_by_tgi(
    serve: ServeScripted, engine: ScriptedEngine, path: str, model: str, name: str
) -> None:
    """`Client.chat()` sends null for all that it leaves out, and a name that is no model's."""
    messages = [{"role": "user", "content": "x", "name": None, "tool_calls": None}]
    body = {"model": model, "messages": messages, "temperature": 0.5, **NULLS}
    await (await serve(TGI)).post(path, json=body)
    asked = dict(engine.calls[-1].body)
    assert asked == {
        "model": name, "messages": [{"role": "user", "content": "x"}], "temperature": 0.5,
    }  # fmt: skip
    await (await serve(ServingProfile(model_name="demo"))).post(path, json=body)
    assert dict(engine.calls[-1].body) == body


SCHEMA = {"type": "boolean"}
OPENAI_S = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CHAT: dict[str, Any] = {"model": "lmi", "messages": [{"role": "user", "content": "x"}]}
# Fields as TGI's clients send them -> as vLLM gets them.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json_object": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"response_format": OPENAI_S},
    ),
    "json": ({"response_format": {"type": "json", "value": SCHEMA}}, {"response_format": OPENAI_S}),
    "json as text": (
        {"response_format": {"type": "json", "value": '{"type": "boolean"}'}},
        {"response_format": OPENAI_S},
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}},
        {"response_format": OPENAI_S},
    ),
    "regex": (
        {"response_format": {"type": "regex", "value": "a+"}},
        {"structured_outputs": {"regex": "a+"}},
    ),
    "OpenAI's": ({"response_format": OPENAI_S}, {"response_format": OPENAI_S}),
    "tool": (
        {"tool_choice": "f"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    "no tool": ({"tool_choice": "none"}, {"tool_choice": "none"}),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize(("given", "read"), FORMS.values(), ids=FORMS)
async def test_schemas_and_tools_of_tgi_s_clients_bind(
    serve: ServeScripted,
    engine: ScriptedEngine,
    path: str,
    given: dict[str, Any],
    read: dict[str, Any],
) -> None:
    """Outside of TGI mode only the schema that vLLM would drop is read."""
    await (await serve(TGI)).post(path, json={**CHAT, **given})
    assert dict(engine.calls[-1].body) == {**CHAT, **read}
    await (await serve(ServingProfile(model_name="demo"))).post(path, json={**CHAT, **given})
    is_dropped = given.get("response_format", {}).get("type") == "json_object"
    assert dict(engine.calls[-1].body) == {**CHAT, **(read if is_dropped else given)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": "regex", "value": 1}, "expected a regular expression"),
        ({"type": "json", "value": "{"}, "no JSON schema"),
        ({"type": "json", "value": 1}, "expected a JSON schema"),
        ({**OPENAI_S, "value": SCHEMA}, "only one of value and json_schema"),
    ],
)
async def test_forms_that_are_none_of_tgi_s_are_named(
    serve: ServeScripted, given: dict[str, Any], text: str
) -> None:
    """As an invalid request of the route."""
    client = await serve(TGI)
    for path, status in (("/v1/chat/completions", 400), ("/invocations", 422)):
        answer = await client.post(path, json={**CHAT, "response_format": given})
        assert answer.status == status
        assert f"response_format{'.value' if 'only' not in text else ''}: " in await answer.text()
        assert text in await answer.text()
    beside = {"response_format": {"type": "regex", "value": "a"}, "structured_outputs": {}}
    answer = await client.post("/v1/chat/completions", json={**CHAT, **beside})
    assert "only one of value and structured_outputs" in await answer.text()


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/info"])
async def test_tgi_routes_wait_for_the_model(serve: ServeScripted, path: str) -> None:
    """Before the model is ready: 503 in TGI's shape, naming the phase, with Retry-After."""
    client = await serve(TGI, is_ready=False)
    response = await client.request(
        "GET" if path == "/info" else "POST", path, json={"inputs": "x"}
    )
    assert (response.status, "Retry-After" in response.headers) == (503, True)
    body = await response.json()
    assert body["error_type"] == "unhealthy"
    assert "settings phase" in body["error"]


async def test_log_says_which_option_answers_tgi_s_routes(
    serve: ServeScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """The 404 is that of any path; the log names the option once for each path."""
    client = await serve()
    for path in ("/generate", "/generate", "/info"):
        assert (await client.post(path, json={"inputs": "x"})).status == 404
    said = [text for text in caplog.messages if "option.tgi_compat=true" in text]
    assert [text.split()[0] for text in said] == ["/generate", "/info"]


@pytest.mark.parametrize("engine", [GatedEngine()], ids=["gated"])
@pytest.mark.parametrize("path", ["/generate", "/invocations"])
async def test_tgi_overload_is_429(serve: ServeScripted, engine: GatedEngine, path: str) -> None:
    """The request above the queue's limit is 429 `overloaded` with Retry-After."""
    engine.gate = asyncio.Event()
    client = await serve(TGI, limit=1)
    first = asyncio.create_task(client.post("/generate", json={"inputs": "x"}))
    await until(lambda: queue_of(client).in_flight == 1)
    refused = await client.post(path, json={"inputs": "x"})
    assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
    assert (await refused.json())["error_type"] == "overloaded"
    async with AsyncInferenceClient(model=str(client.make_url("/")).rstrip("/")) as hub:
        with pytest.raises(OverloadedError):
            await hub.text_generation("x", details=True)
    engine.gate.set()
    assert (await first).status == 200


@pytest.mark.parametrize(("payload", "headers", "name"), ADAPTER_IDS.values(), ids=ADAPTER_IDS)
async def test_generate_takes_adapter_id(
    serve: ServeScripted,
    engine: ScriptedEngine,
    payload: dict[str, Any],
    headers: dict[str, str],
    name: str | None,
) -> None:
    """TGI's adapter_id chooses an adapter where nothing of LMI's does."""
    await check_adapter(await serve(TGI), engine, "/generate", payload, headers, name)


async def test_hub_client_reads_every_answer(serve: ServeScripted) -> None:
    """huggingface_hub's own client parses text, details, streams and errors of the routes."""
    client = await serve(TGI)
    async with AsyncInferenceClient(model=str(client.make_url("/")).rstrip("/")) as hub:
        assert await hub.text_generation("a b", max_new_tokens=3) == " a b a"
        whole = await hub.text_generation("a b", max_new_tokens=3, details=True)
        assert whole.generated_text == " a b a"
        assert [token.logprob for token in whole.details.tokens] == [-0.5] * 3
        assert whole.details.finish_reason == "length"
        texts = [
            text async for text in await hub.text_generation("a b", max_new_tokens=3, stream=True)
        ]
        assert texts == [" a", " b", " a"]
        rows = [
            row
            async for row in await hub.text_generation(
                "a b", max_new_tokens=3, stream=True, details=True
            )
        ]
        assert [row.index for row in rows] == [1, 2, 3]
        assert [row.generated_text for row in rows] == [None, None, " a b a"]
        assert rows[-1].details.generated_tokens == 3
        with pytest.raises(ValidationError, match="temperature"):
            await hub.text_generation("x", temperature=-1.0, details=True)


async def test_long_text_is_not_tokenized(serve: ServeScripted) -> None:
    """A text is only converted, so no model's context bounds it: LMI_MAX_TOKENIZE_LENGTH does."""
    client = await serve(TGI)
    response = await client.post("/tokenize", json={"inputs": "a" * ((512 << 10) + 1)})
    assert response.status == 422
    assert "LMI_MAX_TOKENIZE_LENGTH" in (await response.json())["error"]
    response = await client.post("/tokenize", json={"inputs": "a b"})
    assert response.status == 200
