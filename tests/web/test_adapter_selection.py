"""Which adapter a request gets: header, query, `adapters`, `model`, in this order, or an error."""

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from lmi_vllm.errors import AdapterCapacityError, RequestError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.messages import AdapterRef, OpenAICall, OpenAIReply, ServingProfile
from lmi_vllm.telemetry.records import current_record
from tests.conftest import ServeScripted
from tests.web.conftest import call, register

IDENTIFIER = "X-Amzn-SageMaker-Adapter-Identifier"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"headers": {IDENTIFIER: "a"}, "params": {"adapter": "b"}}, "a"),
        ({"headers": {IDENTIFIER.lower(): "a"}, "json": {"adapters": "unknown"}}, "a"),
        ({"params": {"adapter": "b"}, "json": {"adapters": "c"}}, "b"),
        ({"json": {"adapters": "c"}}, "c"),
        ({"json": {"adapters": ["c"]}}, "c"),
        ({"json": {"adapters": []}}, None),
        ({"json": {"adapters": ""}}, None),
        ({"json": {"adapters": None}}, None),
        ({"json": {"adapters": None, "model": "c"}}, None),
        ({"json": {"adapters": "", "model": "c"}}, None),
        ({"params": {"adapter": ""}, "json": {"adapters": "c"}}, None),
        ({"headers": {IDENTIFIER: ""}, "params": {"adapter": "b"}}, None),
        ({"json": {"parameters": {"adapter_id": "c"}}}, "c"),
        ({"json": {"parameters": {"adapters": "c", "adapter_id": "b"}}}, "c"),
        ({"json": {"parameters": {"adapters": ["c"]}, "model": "a"}}, "c"),
        ({"json": {"parameters": {"adapter_id": "a"}, "adapters": ""}}, None),
        ({"json": {"parameters": {"adapter_id": None}}}, None),
        ({"params": {"adapter": "b"}, "json": {"parameters": {"adapter_id": "c"}}}, "b"),
        ({"json": {"adapters": "", "model": "unknown"}}, None),
        ({"json": {"adapters": "c", "model": "unknown"}}, "c"),
        ({"json": {"model": "lmi"}}, None),
        ({"json": {"model": ""}}, None),
        ({"json": {"model": None}}, None),
    ],
)
async def test_selection_precedence(
    lora: TestClient, engine: ScriptedEngine, options: dict[str, Any], expected: str | None
) -> None:
    """Header before query before payload; nothing named means the base model."""
    await register(lora, *"abc")
    payload = {"inputs": "x", **options.pop("json", {})}
    assert (await call(lora, "POST", "/invocations", json=payload, **options))[0] == 200
    used = engine.jobs[-1].adapter
    assert (used and used.name) == expected


@pytest.mark.parametrize(
    "body",
    [
        {"model": "unknown"},
        {"parameters": {"adapter_id": "unknown"}},
        {"parameters": {"adapters": "unknown"}},
        {"parameters": {"adapters": ["unknown"]}},
        {"stream": True, "model": "unknown"},
    ],
    ids=str,
)
async def test_base_model_answers_for_no_unknown_name(
    lora: TestClient, engine: ScriptedEngine, body: dict[str, Any]
) -> None:
    """Wherever a client names an adapter beside `inputs`."""
    await register(lora, "a")
    status, answer = await call(lora, "POST", "/invocations", json={"inputs": "x", **body})
    assert status == 424
    assert "The adapter unknown was not found" in str(answer)
    assert not engine.jobs


@pytest.mark.parametrize("model", [["json"], 5, {"a": 1}, True, False, 0.0, []], ids=str)
@pytest.mark.parametrize("rest", [{}, {"stream": True}], ids=str)
async def test_base_model_answers_for_no_model_that_is_no_name(
    lora: TestClient, engine: ScriptedEngine, model: object, rest: dict[str, Any]
) -> None:
    """A client that sends one means some adapter."""
    body = {"inputs": "x", "model": model, **rest}
    status, answer = await call(lora, "POST", "/invocations", json=body)
    assert status == 424
    assert "model: expected the name of an adapter or of the served model" in str(answer)
    assert not engine.jobs


async def test_list_of_adapters_may_stand_in_parameters(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """One for each prompt, as beside them."""
    await register(lora, *"ab")
    body = {"inputs": ["x", "y", "z"], "parameters": {"adapters": ["b", "", "a"]}}
    assert (await call(lora, "POST", "/invocations", json=body))[0] == 200
    used = [job.adapter and job.adapter.name for job in engine.jobs[-3:]]
    assert used == ["b", None, "a"]


async def test_misspelt_field_beside_inputs_is_named_once(
    lora: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    """As a misspelt parameter is."""
    for _ in range(2):
        body = {"inputs": "x", "stream": False, "parameter": {}, "max_new_tokens": 3}
        assert (await call(lora, "POST", "/invocations", json=body))[0] == 200
    assert [text for text in caplog.messages if "no effect" in text] == [
        "request field beside inputs 'max_new_tokens' has no effect",
        "request field beside inputs 'parameter' has no effect",
    ]


async def test_openai_selection_falls_back_to_model(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """`model` names an adapter where nothing else does; the call carries the very load."""
    await register(lora, *"ab")
    for extra, expected in (({}, "a"), ({"adapters": "b"}, "b")):
        body = {"model": "a", "prompt": "x", **extra}
        assert (await call(lora, "POST", "/v1/completions", json=body))[0] == 200
        assert engine.calls[-1].adapter == engine.adapters[expected]
        assert "adapters" not in engine.calls[-1].body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/invocations"])
@pytest.mark.parametrize("nothing", ["", None, []])
async def test_base_model_answers_in_place_of_model(
    lora: TestClient, engine: ScriptedEngine, path: str, nothing: object
) -> None:
    """`adapters` is set before `model`, so the engine gets the base model's name; a typo stays."""
    await register(lora, "a")
    for model, sent in (("a", "lmi"), ("typo", "typo")):
        messages = [{"role": "user", "content": "x"}]
        asked = {"messages": messages} if "chat" in path else {"prompt": "x"}
        body = {"model": model, "adapters": nothing, **asked}
        assert (await call(lora, "POST", path, json=body))[0] == 200
        assert engine.calls[-1].adapter is None
        assert engine.calls[-1].body["model"] == sent


async def test_list_of_adapters_belongs_to_a_list_of_inputs(
    lora: TestClient, engine: ScriptedEngine
) -> None:
    """One adapter per input, "" is the base model; other counts are 424."""
    await register(lora, "a")
    payload = {"inputs": ["x", "y"], "adapters": ["a", ""]}
    assert (await call(lora, "POST", "/invocations", json=payload))[0] == 200
    used = {job.prompt: job.adapter and job.adapter.name for job in engine.jobs}
    assert used == {"x": "a", "y": None}
    for wrong in (["a"], ["a", "a", "a"]):
        status, body = await call(lora, "POST", "/invocations", json={**payload, "adapters": wrong})
        assert status == 424
        assert "Number of adapters is not equal to the number of inputs" in body["error"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}, 400),
        ("/invocations", {"prompt": ["x", "y"]}, 424),
        ("/v1/completions", {"prompt": "x", "inputs": ["x", "y"]}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 400),
    ],
)
async def test_list_of_adapters_without_inputs_is_refused_with_its_reason(
    lora: TestClient, path: str, body: dict[str, Any], status: int
) -> None:
    """OpenAI's requests have one adapter; their number of prompts is not the fault."""
    await register(lora, "a")
    given, answer = await call(lora, "POST", path, json={**body, "adapters": ["a", ""]})
    assert given == status
    assert "a list of several adapters goes with a list in `inputs`" in str(answer["error"])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/invocations", {"inputs": "x", "adapters": "xx"}, 424),
        ("/invocations?adapter=xx", {"inputs": "x"}, 424),
        ("/v1/completions", {"prompt": "x", "adapters": "xx"}, 404),
    ],
)
async def test_unknown_adapter_is_never_the_base_model(
    lora: TestClient, engine: ScriptedEngine, path: str, body: dict[str, str], status: int
) -> None:
    """A request for an adapter that is not there is an error naming it."""
    answered, text = await call(lora, "POST", path, json=body)
    assert answered == status
    assert "xx" in str(text)
    assert not engine.jobs
    assert not engine.calls


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/invocations", {"inputs": "x", "adapters": "b"}, 424),
        ("/invocations", {"inputs": "x", "adapters": "b", "stream": True}, 424),
        ("/invocations", {"inputs": ["x", "y"], "adapters": ["a", "b"]}, 424),
        ("/invocations", {"messages": [{"role": "user", "content": "x"}], "model": "b"}, 424),
        ("/v1/completions", {"prompt": "x", "model": "b"}, 503),
        ("/v1/completions", {"prompt": "x", "model": "b", "stream": True}, 503),
    ],
)
async def test_lack_of_a_slot_has_retry_after(
    serve: ServeScripted, path: str, body: dict[str, Any], status: int
) -> None:
    """While every slot is pinned, a request for another adapter may be sent elsewhere, or later."""
    lora = await serve(ServingProfile(model_name="demo", enable_lora=True, adapter_slots=1))
    for name, more in {"b": {}, "a": {"pin": "true"}}.items():
        params = {"name": name, "src": f"/{name}", **more}
        assert (await call(lora, "POST", "/adapters", params=params))[0] == 200
    answer = await lora.post(path, json=body)
    assert (answer.status, answer.headers.get("Retry-After")) == (status, "5")
    assert "all 1 are pinned" in await answer.text()
    assert (await lora.post("/invocations", json={"inputs": "x", "adapters": "a"})).status == 200
    assert (await call(lora, "DELETE", "/adapters/a"))[0] == 200
    assert (await lora.post("/invocations", json={"inputs": "x", "adapters": "b"})).status == 200


async def test_refusal_in_the_engine_has_retry_after_too(
    lora: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine notes it in the request's record: vLLM's own answers have no such header."""

    async def refused(_engine: ScriptedEngine, _call: OpenAICall, _direct: object) -> OpenAIReply:
        record = current_record()
        assert record is not None
        record.retry_after_seconds = 5
        raise RequestError("all 1 are pinned")

    monkeypatch.setattr(ScriptedEngine, "answer_openai", refused)
    answer = await lora.post("/v1/completions", json={"prompt": "x", "model": "lmi"})
    assert (answer.status, answer.headers.get("Retry-After")) == (400, "5")


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/adapters", {"params": {"name": "c", "src": "/c", "pin": "true"}}),
        ("/v1/load_lora_adapter", {"json": {"lora_name": "c", "lora_path": "/c"}}),
    ],
)
async def test_registration_without_a_slot_has_retry_after(
    lora: TestClient, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, Any]
) -> None:
    """A slot may be free in a moment; so may memory."""

    async def full(_engine: ScriptedEngine, _adapter: AdapterRef) -> None:
        raise AdapterCapacityError("No free lora slots")

    monkeypatch.setattr(ScriptedEngine, "load_adapter", full)
    answer = await lora.post(path, **options)
    assert (answer.status, answer.headers.get("Retry-After")) == (507, "5")


async def test_log_says_that_adapters_are_off(
    serve: ServeScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is that of an unknown name; the log names the option, once."""
    client = await serve()
    for _ in range(2):
        answer = await client.post("/invocations", json={"inputs": "x", "adapters": "fr"})
        assert answer.status == 424
    assert len([text for text in caplog.messages if "option.enable_lora=true" in text]) == 1
