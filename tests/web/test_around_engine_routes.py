"""What stays around a route of the engine's own application, whatever its dialect.

Refusals in its form, the drain and its deadline, a client that goes, what is counted and logged.
"""

import asyncio
import json
import logging
from typing import Final, Self
from unittest.mock import AsyncMock

import pytest

from lmi_vllm.adapters.registry import AdapterRegistry
from lmi_vllm.errors import Dialect
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import HttpRoute, OpenAIReply, RouteKind, ServingProfile
from lmi_vllm.web.request import SERVICE, WebOptions
from tests.conftest import ServeScripted
from tests.support.queue import admitted
from tests.support.scripted_application import EchoingApplication
from tests.web.conftest import lifecycle_of, queue_of, register, until
from tests.web.test_metrics import grown, key, samples

POST: Final = frozenset({"POST"})
ROUTES: Final = tuple(
    HttpRoute(path, POST, RouteKind.INFERENCE, dialect)
    for path, dialect in (
        ("/v1/messages", Dialect.ANTHROPIC),
        ("/v1/responses", Dialect.OPENAI),
        ("/v1/chat/completions/batch", Dialect.OPENAI),
        ("/cohere/v2/chat", Dialect.COHERE),
        ("/rerank", Dialect.OPENAI),
    )
)
# How a stream of each ends that is cut.
ENDS: Final = {
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{',
    "/v1/responses": b'event: error\ndata: {"type":"error","code":"server_error"',
    "/v1/chat/completions/batch": b"data: [DONE]\n\n",
    "/cohere/v2/chat": b'"finish_reason":"ERROR"}}\n\ndata: [DONE]\n\n',
    "/rerank": b"data: [DONE]\n\n",
}
EVENTS: Final = b"data: 0\n\ndata: 1\n\n"
of_each_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)


class Gated(EchoingApplication):
    """Streams stop after an event until the gate is open."""

    gate: asyncio.Event


@pytest.fixture
def gated(engine: ScriptedEngine) -> Gated:
    """The application of the scripted engine."""
    engine.http = Gated(engine, ROUTES, chunks=2, gate=asyncio.Event())
    return engine.http


def check_form(route: HttpRoute, body: bytes, status: int, words: str) -> None:
    """Assert that a refusal has the error object of its route."""
    document = json.loads(body)
    if route.dialect is Dialect.COHERE:
        assert list(document) == ["message"]
        assert words in document["message"]
        return
    assert words in document["error"]["message"]
    if route.dialect is Dialect.ANTHROPIC:
        assert (document["type"], set(document["error"])) == ("error", {"type", "message"})
    else:
        assert document["error"]["code"] == status


@of_each_route
async def test_full_queue_refuses_in_the_form_of_the_route(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """503 with the time to come back."""
    client = await serve(limit=1)
    with admitted(queue_of(client)):
        response = await client.post(route.path, json={})
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    check_form(route, await response.read(), 503, "capacity exceeded")


@of_each_route
async def test_missing_key_is_refused_in_the_form_of_the_route(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """401; nothing is asked of the engine."""
    client = await serve(options=WebOptions(api_keys=("secret",)))
    response = await client.post(route.path, json={})
    assert response.status == 401
    check_form(route, await response.read(), 401, "API key")
    assert gated.closed == 0


@of_each_route
async def test_unknown_adapter_is_refused_in_the_form_of_the_route(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """404: never the base model."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    named = {"x-amzn-sagemaker-adapter-identifier": "nothing"}
    response = await client.post(route.path, json={}, headers=named)
    assert response.status == 404
    check_form(route, await response.read(), 404, "nothing")


async def test_adapters_that_a_request_does_not_name_cost_it_nothing(
    serve: ServeScripted, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands: none is looked at, though one may have code of its own."""

    def all_of_them(_: AdapterRegistry) -> None:
        raise AssertionError

    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    monkeypatch.setattr(AdapterRegistry, "__iter__", all_of_them)
    gated.gate.set()
    assert (await client.post("/v1/messages", json={"model": "demo"})).status == 200


@of_each_route
async def test_limit_is_refused_in_the_form_of_the_route(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """400 with the limit's name."""
    client = await serve()
    response = await client.post(route.path, json={"stop": ["x"] * 65})
    assert response.status == 400
    check_form(route, await response.read(), 400, "LMI_MAX_STOP_STRINGS")


@of_each_route
async def test_form_of_many_fields_is_refused_in_the_form_of_the_route(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """Before they are parsed, which would hold up every other request."""
    client = await serve()
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    response = await client.post(route.path, data=b"\r\n--x" * 1001, headers=kind)
    assert response.status == 400
    check_form(route, await response.read(), 400, "more than 1000 fields")


@of_each_route
async def test_stream_that_runs_is_whole_after_the_drain(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """New requests are refused meanwhile, and their connections closed."""
    client = await serve()
    response = await client.post(route.path, json={"stream": True})
    assert await response.content.readuntil(b"\n\n") == EVENTS[:9]
    lifecycle_of(client).set_state(State.DRAINING)
    refused = await client.post(route.path, json={})
    assert (refused.status, refused.headers["Connection"]) == (503, "close")
    check_form(route, await refused.read(), 503, "draining")
    gated.gate.set()
    assert await response.read() == EVENTS[9:]
    assert await queue_of(client).wait_idle(5)


@of_each_route
async def test_stream_that_outlives_the_drain_is_ended(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """By an event of the route's own; the application's handler is told."""
    client = await serve()
    response = await client.post(route.path, json={"stream": True})
    await response.content.readuntil(b"\n\n")
    lifecycle_of(client).set_state(State.DRAINING)
    queue_of(client).cancel_all()
    rest = await response.read()
    assert b"the server shut down before the answer was complete" in rest
    assert ENDS[route.path] in rest
    await until(lambda: gated.closed == 1)


@of_each_route
async def test_client_disconnect_is_counted_and_ends_the_stream(
    serve: ServeScripted, gated: Gated, route: HttpRoute
) -> None:
    """As 499, under the route and its dialect; its place in the queue is free."""
    client = await serve()
    before = await samples(client)
    response = await client.post(route.path, json={"stream": True})
    await response.content.readuntil(b"\n\n")
    response.close()
    await until(lambda: gated.closed == 1)
    await until(lambda: not queue_of(client).in_flight)
    more = await grown(client, before)
    labels = {"route": route.path, "dialect": str(route.dialect), "adapter": "base"}
    assert more[key("lmi_requests_total", **labels, status="499")] == 1
    assert more[key("lmi_client_disconnects_total", dialect=str(route.dialect))] == 1


class SlowToClose:
    """A stream of one event; what it holds is released long after its end was sent."""

    def __init__(self) -> None:
        self.events = [EVENTS[:9]]
        self.closings = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self.events:
            raise StopAsyncIteration
        return self.events.pop()

    async def aclose(self) -> None:
        """Be closed as its last event is read, and again with the request."""
        self.closings += 1
        if self.closings > 1:
            await asyncio.sleep(30)  # until the client's going cancels the request


async def test_client_that_leaves_with_the_whole_stream_was_answered(
    serve: ServeScripted, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the status that it has got, also where the request is not over at that moment."""
    stream = SlowToClose()
    reply = OpenAIReply(200, content_type="text/event-stream", stream=stream)
    monkeypatch.setattr(gated, "call", AsyncMock(return_value=reply))
    client = await serve()
    before = await samples(client)
    reader, writer = await asyncio.open_connection(client.host, client.port)
    writer.write(b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n")
    writer.write(b'{"stream":true}')
    assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    await until(lambda: stream.closings == 2)
    writer.close()
    await until(lambda: not queue_of(client).in_flight)
    more = await grown(client, before)
    labels = {"route": "/v1/responses", "dialect": "openai", "adapter": "base", "status": "200"}
    assert more[key("lmi_requests_total", **labels)] == 1
    assert not more.get(key("lmi_client_disconnects_total", dialect="openai"))


@of_each_route
async def test_answer_is_counted_and_logged(
    serve: ServeScripted, gated: Gated, route: HttpRoute, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the route, its dialect, the status and the times."""
    caplog.set_level(logging.INFO)
    gated.gate.set()
    client = await serve()
    before = await samples(client)
    headers = {"x-request-id": "the-one"}
    response = await client.post(route.path, json={"stream": True}, headers=headers)
    assert await response.read() == EVENTS
    more = await grown(client, before)
    dialect = str(route.dialect)
    labels = {"route": route.path, "dialect": dialect, "adapter": "base", "status": "200"}
    assert more[key("lmi_requests_total", **labels)] == 1
    assert more[key("lmi_request_duration_seconds_count", dialect=dialect)] == 1
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    (line,) = [one for one in fields if one.get("request_id") == "the-one"]
    assert [line[name] for name in ("route", "dialect", "status")] == [route.path, dialect, 200]


async def test_work_in_the_background_holds_its_place_until_it_ends(
    serve: ServeScripted, gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer comes at once; the queue is full as long as the work goes on, and a drain waits.

    Its line of the log is a second one.
    """
    caplog.set_level(logging.INFO)
    client = await serve(limit=1)
    body = {"background": True}
    assert (await client.post("/v1/responses", json=body)).status == 200
    assert (queue_of(client).in_flight, gated.closed) == (1, 0)
    assert (await client.post("/v1/responses", json=body)).status == 503
    assert not await queue_of(client).wait_idle(0.01)
    gated.gate.set()
    assert await queue_of(client).wait_idle(5)
    assert gated.closed == 1
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    found = [(one["status"], one.get("deferred")) for one in fields if "status" in one]
    assert found == [(200, None), (503, None), (200, True)]


async def test_streamed_work_in_the_background_outlives_its_client(
    serve: ServeScripted, gated: Gated
) -> None:
    """What it holds is released once both have ended."""
    client = await serve()
    response = await client.post("/v1/responses", json={"background": True, "stream": True})
    await response.content.readuntil(b"\n\n")
    response.close()
    await until(lambda: gated.closed == 1)  # the stream's
    assert queue_of(client).in_flight == 1
    gated.gate.set()
    assert await queue_of(client).wait_idle(5)


async def test_work_in_the_background_that_outlives_the_drain_is_ended(
    serve: ServeScripted, gated: Gated
) -> None:
    """As any other request."""
    client = await serve()
    assert (await client.post("/v1/responses", json={"background": True})).status == 200
    queue_of(client).cancel_all()
    assert await queue_of(client).wait_idle(5)
    assert gated.closed == 1


async def test_work_in_the_background_keeps_its_adapter(
    serve: ServeScripted, engine: ScriptedEngine, gated: Gated
) -> None:
    """Its removal waits for the work."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    await register(client, "a1")
    body = {"model": "a1", "background": True}
    assert (await client.post("/v1/responses", json=body)).status == 200
    registry = client.app[SERVICE].runtime.adapters
    assert registry.is_used("a1")
    gated.gate.set()
    assert await queue_of(client).wait_idle(5)
    assert not registry.is_used("a1")


async def test_work_in_the_background_that_fails_is_counted_so(
    serve: ServeScripted, gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    """Its answer was sent long before; the line of the work says what became of it."""
    caplog.set_level(logging.INFO)
    gated.dies_after = 0
    client = await serve()
    assert (await client.post("/v1/responses", json={"background": True})).status == 200
    assert await queue_of(client).wait_idle(5)
    fields = [getattr(record, "fields", {}) for record in caplog.records]
    found = [(one["status"], one.get("deferred")) for one in fields if "status" in one]
    assert found == [(200, None), (500, True)]


async def test_work_in_the_background_may_be_read_during_a_drain(
    serve: ServeScripted, gated: Gated
) -> None:
    """The drain waits for it; new work is refused."""
    stored = HttpRoute(
        "/v1/responses/{id}", frozenset({"GET"}), RouteKind.INFORMATION, Dialect.OPENAI
    )
    gated.routes = (*ROUTES, stored)
    client = await serve()
    assert (await client.post("/v1/responses", json={"background": True})).status == 200
    lifecycle_of(client).set_state(State.DRAINING)
    assert (await client.get("/v1/responses/one")).status == 200
    assert (await client.post("/v1/responses", json={})).status == 503
