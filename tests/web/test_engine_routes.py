"""Routes of the engine's own HTTP application: keys, queue, adapters and limits are around them."""

import asyncio
import contextlib
import io
import json
import sys
from collections.abc import AsyncGenerator
from types import FrameType
from typing import Final

import pytest
from aiohttp import FormData, WSServerHandshakeError

from lmi_vllm.errors import Dialect, Fault
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import HttpRoute, RouteKind, ServingProfile
from lmi_vllm.web.request import SERVICE, Routes, WebOptions
from tests.conftest import ServeScripted
from tests.support.queue import admitted
from tests.support.scripted_application import EchoingApplication as Application
from tests.support.scripted_application import by_name
from tests.web.conftest import A, B, lifecycle_of, queue_of, register

POST: Final = frozenset({"POST"})
MESSAGES: Final = HttpRoute("/v1/messages", POST, RouteKind.INFERENCE, Dialect.ANTHROPIC)
COMPLETIONS: Final = HttpRoute("/v1/completions", POST, RouteKind.INFERENCE, Dialect.OPENAI)
COHERE: Final = HttpRoute("/cohere/v2/chat", POST, RouteKind.INFERENCE, Dialect.COHERE)
RESPONSES: Final = HttpRoute("/v1/responses", POST, RouteKind.INFERENCE, Dialect.OPENAI)
BATCH: Final = HttpRoute("/v1/batch", POST, RouteKind.INFERENCE, Dialect.OPENAI)
VERSION: Final = HttpRoute(
    "/version", frozenset({"GET"}), RouteKind.INFORMATION, Dialect.OPENAI
)  # fmt: skip
SLEEP: Final = HttpRoute("/sleep", POST, RouteKind.MANAGEMENT, Dialect.OPENAI)
WAKE: Final = HttpRoute("/wake_up", POST, RouteKind.MANAGEMENT, Dialect.OPENAI)
KEY: Final = {"x-api-key": "secret"}


ROUTES: Final = (MESSAGES, COHERE, RESPONSES, BATCH, COMPLETIONS, VERSION, SLEEP, WAKE)


@pytest.fixture
def application(engine: ScriptedEngine) -> Application:
    """The application of the scripted engine."""
    engine.http = Application(engine, ROUTES)
    return engine.http


async def test_body_is_forwarded_unchanged(serve: ServeScripted, application: Application) -> None:
    """Query, headers and the request's id too; status, body and headers come back.

    Headers that are there twice stay so, in their order: code of the user's may read them.
    """
    client = await serve()
    body = b'{"a": NaN, "a": 1e999}'
    headers = [("x-mine", "1"), ("x-mine", "2")]
    response = await client.post("/v1/messages?beta=true", data=body, headers=headers)
    assert (response.status, await response.read()) == (200, body)
    assert response.headers["x-of-vllm"] == "1"
    assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    (call,) = application.calls
    assert (call.method, call.path, call.query_string) == ("POST", "/v1/messages", "beta=true")
    assert call.body == body
    assert [value for name, value in call.headers if name == b"x-mine"] == [b"1", b"2"]
    assert call.request_id == response.headers["x-request-id"]


async def test_unknown_path_is_no_route(serve: ServeScripted, application: Application) -> None:
    """404 as before, from us."""
    client = await serve()
    assert (await client.post("/v1/nothing", data=b"{}")).status == 404
    assert application.calls == []


async def test_websocket_is_refused_by_name(serve: ServeScripted, application: Application) -> None:
    """Before the handshake, so that any client shows a status; it says what there is instead."""
    client = await serve()
    with pytest.raises(WSServerHandshakeError) as refused:
        await client.ws_connect("/v1/realtime")
    assert refused.value.status == 404
    headers = {"Connection": "upgrade", "Upgrade": "websocket"}
    answer = await client.get("/v1/realtime", headers=headers)
    assert "/v1/audio/transcriptions" in (await answer.json())["error"]["message"]
    assert "WebSocket" not in await (await client.get("/v1/realtime")).text()


async def test_no_route_is_known_before_there_is_a_model(serve: ServeScripted) -> None:
    """A path where such routes are is 503 as long as the server starts, any other 404."""
    client = await serve(is_ready=False)
    response = await client.post("/v1/messages", data=b"{}")
    assert (response.status, "Retry-After" in response.headers) == (503, True)
    assert (await client.get("/nothing")).status == 404


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions"])
async def test_other_method_is_the_application_s_to_refuse(
    serve: ServeScripted, application: Application, path: str, method: str
) -> None:
    """Also where the server is full: nothing is asked of the engine."""
    client = await serve(limit=1)
    with admitted(queue_of(client)):
        response = await client.request(method, path)
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert [(call.method, call.path) for call in application.calls] == [(method, path)]


ODD: Final = {
    "no type": (b'{"prompt": "x"}', ""),
    "another type": (b'{"prompt": "x"}', "text/plain"),
    "no JSON": (b"{", "application/json"),
    "no object": (b"[]", "application/json"),
    "NaN": (b'{"prompt": "x", "a": NaN}', "application/json"),
    "surrogate": (b'{"prompt": "\\ud800"}', "application/json"),
    "another code": ('{"prompt": "x"}'.encode("utf-16"), "application/json"),
    "huge": (b'{"prompt": "x", "a": [{"b": 123456789012345678901}]}', "application/json"),
    "deep": (b'{"prompt": "x", "a":' + b"[" * 200 + b"]" * 200 + b"}", "application/json"),
}
PLAIN: Final = {
    "object": (b'{"prompt": "x"}', "application/json"),
    "charset": (b'{"prompt": "x"}', "Application/JSON; charset=utf-8"),
    "numbers": (b'{"prompt": [1, 2], "a": 1.5, "b": 9223372036854775807}', "application/json"),
}


@pytest.mark.parametrize(("body", "kind"), ODD.values(), ids=ODD)
async def test_ambiguous_body_is_left_to_the_application(
    serve: ServeScripted, application: Application, body: bytes, kind: str
) -> None:
    """The lane of completions does not take it: it goes on as it came."""
    client = await serve()
    await client.post("/v1/completions", data=body, headers={"Content-Type": kind})
    assert [call.body for call in application.calls] == [body]


@pytest.mark.parametrize(("body", "kind"), PLAIN.values(), ids=PLAIN)
async def test_plain_body_takes_the_lane(
    serve: ServeScripted, engine: ScriptedEngine, application: Application, body: bytes, kind: str
) -> None:
    """The application is not asked."""
    client = await serve()
    response = await client.post("/v1/completions", data=body, headers={"Content-Type": kind})
    assert (response.status, application.calls) == (200, [])
    assert dict(engine.calls[0].body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        ({}, {}, None),
        ({}, {"X-Request-Id": "given"}, "given"),
        ({"request_id": "mine"}, {}, ""),
        ({"request_id": "mine"}, {"X-Request-Id": "given"}, ""),
    ],
)
async def test_id_in_the_header_wins_over_the_body(
    serve: ServeScripted,
    application: Application,
    body: dict[str, str],
    headers: dict[str, str],
    found: str | None,
) -> None:
    """The application has both then; where there is neither it gets the id of the answer."""
    client = await serve()
    response = await client.post("/v1/messages", json=body, headers=headers)
    (call,) = application.calls
    expected = response.headers["x-request-id"] if found is None else found
    assert call.request_id == expected
    assert by_name(call).get("x-request-id") == headers.get("X-Request-Id")


@pytest.mark.parametrize(("path", "shape"), [("/v1/messages", "type"), ("/v1/batch", "error")])
async def test_missing_key_is_refused_in_the_route_s_dialect(
    serve: ServeScripted, application: Application, path: str, shape: str
) -> None:
    """Anthropic's error object has a type of its own beside it."""
    client = await serve(options=WebOptions(api_keys=("secret",)))
    response = await client.post(path, data=b"{}")
    document = await response.json()
    assert (response.status, next(iter(document))) == (401, shape)
    assert document["error"]["type"] == "AuthenticationError"
    assert (await client.post(path, data=b"{}", headers=KEY)).status == 200
    assert len(application.calls) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stop_sequences": ["x"] * 65}, "LMI_MAX_STOP_STRINGS"),
        ({"sampling_params": {"n": 17}}, "sampling_params.n: at most 16"),
        ({"prompt": ["x"] * 101}, "job_queue_size"),
    ],
)
async def test_limits_hold(
    serve: ServeScripted, application: Application, body: object, words: str
) -> None:
    """Also of a body that only Python's own parser reads."""
    client = await serve(limit=100)
    for content in (json.dumps(body), json.dumps(body)[:-1] + ', "x": NaN}'):
        response = await client.post("/v1/messages", data=content)
        assert (response.status, words in await response.text()) == (400, True)
    assert application.calls == []


async def test_items_of_a_conversation_are_one_prompt(serve: ServeScripted) -> None:
    """A Responses call with 101 messages takes one slot of the queue."""
    client = await serve(limit=100)
    body = {"model": "lmi", "input": [{"role": "user", "content": "x"}] * 101}
    response = await client.post("/v1/responses", json=body)
    assert response.status == 200, await response.text()


async def test_full_queue_refuses(serve: ServeScripted, application: Application) -> None:
    """Before the body is read; routes of information are still answered."""
    client = await serve(limit=1)
    with admitted(queue_of(client)):
        assert (await client.post("/v1/messages", data=b"{}")).status == 503
        assert (await client.get("/version")).status == 200
    assert [call.path for call in application.calls] == ["/version"]
    assert queue_of(client).in_flight == 0


@pytest.mark.parametrize(
    ("path", "parser"),
    [
        ("/v1/messages", "lmi_vllm.inference.engine_routes._payload"),
        ("/v1/completions", "lmi_vllm.web.engine_routes.plain_payload"),
    ],
)
async def test_body_is_not_parsed_if_the_queue_filled_meanwhile(
    serve: ServeScripted,
    application: Application,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    parser: str,
) -> None:
    """Parsing holds up every other request."""
    client = await serve(limit=1)
    parsed: list[object] = []
    monkeypatch.setattr(parser, parsed.append)
    with contextlib.ExitStack() as others:

        def fill(_: bytes) -> None:
            others.enter_context(admitted(queue_of(client)))

        monkeypatch.setattr("lmi_vllm.web.inference_routes.check_values", fill)
        assert (await client.post(path, data=b"{}")).status == 503
    assert (parsed, application.calls) == ([], [])


async def test_named_adapter_answers(
    serve: ServeScripted, engine: ScriptedEngine, application: Application
) -> None:
    """By `model` or by SageMaker's header; one that is not registered is never the base model."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "a1")
    await client.post("/v1/messages", json={"model": "a1"})
    await client.post("/v1/messages", json={"model": "other"})
    header = {"x-amzn-sagemaker-adapter-identifier": "a1"}
    await client.post("/v1/messages", json={"model": "lmi"}, headers=header)
    found = [None if call.adapter is None else call.adapter.name for call in application.calls]
    assert found == ["a1", None, "a1"]
    header = {"x-amzn-sagemaker-adapter-identifier": "a2"}
    assert (await client.post("/v1/messages", json={}, headers=header)).status == 404
    assert len(application.calls) == 3


async def test_base_model_is_named_where_model_names_an_adapter(
    serve: ServeScripted, application: Application
) -> None:
    """The application would refuse the adapter's name, which it does not know."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "a1")
    for body in ({"model": "a1", "adapters": ""}, {"model": "lmi", "adapters": ""}):
        assert (await client.post("/v1/messages", json=body)).status == 200
    assert [(call.adapter, call.model) for call in application.calls] == [(None, "lmi"), (None, "")]


async def test_adapter_that_a_form_names_answers(
    serve: ServeScripted, engine: ScriptedEngine, application: Application
) -> None:
    """Audio comes as a form: its `model` means an adapter as that of JSON does, in the limits."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "a1")
    for model in ("a1", "lmi"):
        form = FormData({"model": model, "file": io.BytesIO(b"\x00sound")})
        assert (await client.post("/v1/batch", data=form)).status == 200
    found = [None if call.adapter is None else call.adapter.name for call in application.calls]
    assert found == ["a1", None]
    assert b"\x00sound" in application.calls[0].body
    form = FormData({"model": "a1", "n": "17", "file": io.BytesIO(b"sound")})
    assert (await client.post("/v1/batch", data=form)).status == 400


async def test_stream_is_given_on(serve: ServeScripted, application: Application) -> None:
    """Each chunk as it is; the slot and the stream end with it."""
    client = await serve()
    response = await client.post("/v1/messages", json={"stream": True})
    assert response.headers["Content-Type"] == "text/event-stream"
    assert await response.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert (queue_of(client).in_flight, application.closed) == (0, 1)


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":'),
        ("/v1/batch", b'data: {"error":{"message":'),
        ("/cohere/v2/chat", b'"finish_reason":"ERROR"}}\n\ndata: [DONE]\n\n'),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error","message":'),
    ],
)
async def test_cut_stream_ends_in_its_dialect(
    serve: ServeScripted, application: Application, path: str, end: bytes
) -> None:
    """The engine's death is the last event."""
    application.dies_after = 2
    client, causes = await serve(), []
    lifecycle_of(client).on_failure.append(causes.append)
    response = await client.post(path, json={"stream": True})
    assert end in await response.read()
    assert causes == [Fault.ENGINE]


async def test_cut_stream_of_no_events_does_not_look_whole(
    serve: ServeScripted, application: Application
) -> None:
    """The connection is cut: its end would be that of a whole answer."""
    application.dies_after, application.content_type = 2, "application/octet-stream"
    client = await serve()
    response = await client.post("/v1/messages", json={"stream": True})
    with pytest.raises(Exception, match=r"closed|payload|not completed|reset"):
        await response.read()


async def test_route_that_acts_on_the_server_needs_a_key(
    serve: ServeScripted, application: Application
) -> None:
    """Where there is none to send, it does not exist at all."""
    client = await serve()
    response = await client.post("/sleep")
    assert (response.status, "LMI_API_KEY" in await response.text()) == (401, True)
    guarded = await serve(options=WebOptions(api_keys=("secret",)))
    assert (await guarded.post("/sleep")).status == 401
    assert (await guarded.post("/sleep", headers=KEY)).status == 200
    assert [call.path for call in application.calls] == ["/sleep"]


@pytest.mark.parametrize(
    ("routes", "statuses"), [(Routes.INFERENCE, [200, 404]), (Routes.MANAGEMENT, [404, 200])]
)
async def test_route_is_on_the_listener_of_its_kind(
    serve: ServeScripted, application: Application, routes: Routes, statuses: list[int]
) -> None:
    """Management has an address of its own where one is configured."""
    client = await serve(options=WebOptions(api_keys=("secret",), routes=routes))
    found = [(await client.post(path, headers=KEY)).status for path in ("/v1/batch", "/sleep")]
    assert found == statuses


async def test_engine_that_sleeps_refuses_by_name_until_it_is_woken(
    serve: ServeScripted, application: Application
) -> None:
    """Health is 503 with the word for it; what wakes it still reaches it, and what only informs."""
    client = await serve(options=WebOptions(api_keys=("secret",)))
    assert (await client.post("/sleep", headers=KEY)).status == 200
    for path, body in (("/invocations", {"inputs": "x"}), ("/v1/messages", {})):
        response = await client.post(path, json=body, headers=KEY)
        assert (response.status, "asleep" in await response.text()) == (503, True)
    health = await client.get("/ping")
    assert (health.status, await health.json()) == (503, {"demo": {"status": "Asleep"}})
    assert (await client.get("/version", headers=KEY)).status == 200
    assert (await client.get("/v1/models", headers=KEY)).status == 200  # routers go on reading it
    assert (await client.post("/wake_up", headers=KEY)).status == 200
    assert (await client.post("/v1/messages", json={}, headers=KEY)).status == 200
    assert (await client.get("/ping")).status == 200
    lifecycle_of(client).set_state(State.DRAINING)  # it waits for what a pause has kept
    assert (await client.post("/wake_up", headers=KEY)).status == 200
    assert (await client.post("/v1/messages", json={}, headers=KEY)).status == 503


@pytest.mark.parametrize("sees_every_request", [False, True])
async def test_user_s_middleware_sees_completions_too(
    serve: ServeScripted, application: Application, sees_every_request: bool
) -> None:
    """It is around the engine's application, so the lane of our own is not taken."""
    application.sees_every_request = sees_every_request
    client = await serve()
    body = {"prompt": "x", "max_tokens": 1}
    assert (await client.post(COMPLETIONS.path, json=body)).status == 200
    assert [call.path for call in application.calls] == [COMPLETIONS.path] * sees_every_request


PING: Final = HttpRoute("/ping", frozenset({"GET"}), RouteKind.INFORMATION, Dialect.OPENAI)
INVOCATIONS: Final = HttpRoute("/invocations", POST, RouteKind.INFERENCE, Dialect.OPENAI)


@pytest.mark.parametrize("is_changed", [False, True])
async def test_user_s_code_in_the_application_answers_invocations_and_ping(
    serve: ServeScripted, engine: ScriptedEngine, is_changed: bool
) -> None:
    """Where there is none both are LMI's; `/predictions` always is."""
    engine.http = Application(engine, (PING, INVOCATIONS), sees_every_request=is_changed)
    engine.script = (A, B)
    client = await serve()
    assert (await client.get("/ping")).status == 200
    assert (await client.post("/invocations", json={"inputs": "x"})).status == 200
    assert (await client.post("/predictions/demo", json={"inputs": "x"})).status == 200
    handed_on = [call.path for call in engine.http.calls]
    assert handed_on == ["/ping", "/invocations"] * is_changed


async def test_user_s_ping_is_not_asked_before_the_server_is_ready(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """503 with the phase, as always."""
    engine.http = Application(engine, (PING,), sees_every_request=True)
    client = await serve()
    lifecycle_of(client).begin_restart()
    response = await client.get("/ping")
    assert (response.status, (await response.json())["demo"]["phase"]) == (503, "engine")
    assert engine.http.calls == []


async def test_path_of_the_application_is_looked_up_once(
    serve: ServeScripted, application: Application
) -> None:
    """Aiohttp makes an exception and a route for each request whose path it does not know."""
    client = await serve()
    made = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_qualname == "HTTPException.__init__":
            made.append(frame)

    for wanted in (1, 0):
        sys.setprofile(profile)
        try:
            response = await client.post("/v1/messages", json={"model": "demo"})
        finally:
            sys.setprofile(None)
        assert (response.status, len(made)) == (200, wanted)
        made.clear()
    assert (await client.post("/v1/unknown", json={})).status == 404


CUT: Final = (
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":1,'
    b'"response":{"status":"incomplete"}}\n\n'
)


async def test_kept_response_that_was_cut_ends_as_it_did_when_it_was_asked(
    serve: ServeScripted, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read again, its stream has the same last event."""

    async def cut() -> AsyncGenerator[bytes, None]:
        yield CUT

    monkeypatch.setattr(application, "_chunks", cut)
    kept = HttpRoute(
        "/v1/responses/{id}", frozenset({"GET"}), RouteKind.INFORMATION, Dialect.OPENAI
    )
    application.routes = (*ROUTES, kept)
    client = await serve()
    first = await client.post("/v1/responses", json={"stream": True})
    again = await client.get("/v1/responses/one", json={"stream": True})
    assert await first.read() == await again.read() == CUT.replace(b"completed", b"incomplete")


async def test_reading_route_of_an_engine_that_has_ended_is_refused(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """It would ask what is gone; who only reads wakes nothing. What asks no engine is answered."""
    reads = frozenset({"GET"})
    asleep = HttpRoute("/is_sleeping", reads, RouteKind.MANAGEMENT, Dialect.OPENAI)
    engine.http = Application(engine, (*ROUTES, asleep))
    client = await serve(options=WebOptions(api_keys=("secret",)))
    service = client.app[SERVICE]
    service.lifecycle.fall_asleep()
    service.rest.level = "stop"
    refused = await client.get("/is_sleeping", headers=KEY)
    assert (refused.status, "its engine has ended" in await refused.text()) == (503, True)
    assert (await client.get("/version", headers=KEY)).status == 200
    for path in ("/is_sleeping", "/v1/messages/count_tokens", "/v1/messages"):
        await asyncio.wait_for(client.delete(path, headers=KEY), 10)  # a method it does not have
    for path in ("/v1/messages", "/invocations", "/nowhere"):
        assert (await asyncio.wait_for(client.post(path), 10)).status in (401, 404)  # without a key
    assert not service.rest.wanted.is_set()
    service.rest.level = "1"
    assert (await client.get("/is_sleeping", headers=KEY)).status == 200
