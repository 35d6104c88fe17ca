"""Deferred results: the token, the pieces, the bounds, the end (docs/sessions.md)."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient

from lmi_vllm.errors import BadParameterError, PayloadError
from lmi_vllm.features.deferred.results import DeferredResults, deferring
from lmi_vllm.features.scripted.engine import Fail
from lmi_vllm.messages import Reply
from lmi_vllm.server.context import ServerEvents, error_statuses
from lmi_vllm.telemetry.records import RequestRecord, RequestSummary, enter_record
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.assembled import load_settings
from tests.unit.features.deferred.conftest import keep
from tests.web.conftest import ROW_A, STREAM, A, B, GatedEngine, queue_of, until

LATER = {"x-synchronous": "false"}
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
ROW_B = (
    b'{"index":0,"token":{"id":9,"text":" b","log_prob":-0.5,"logprob":-0.5},'
    b'"generated_text":" a b"}\n'
)


@pytest.fixture
def engine() -> GatedEngine:
    """Return an engine that gives " a", waits for its gate, and gives " b"."""
    return GatedEngine(script=(A, B))


async def start(client: TestClient, body: object = STREAM) -> str:
    """Return the token of a request that is answered later."""
    answer = await client.post("/invocations", json=body, headers=LATER)
    token = answer.headers["x-next-token"]
    assert (answer.status, await answer.read()) == (200, b"")
    assert re.fullmatch(r"[0-9a-f-]{36}", token)
    assert answer.headers[ATTRIBUTES] == f"x-next-token={token}"
    return token


async def read(client: TestClient, token: str, **headers: str) -> ClientResponse:
    """Return what there is from a token on."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post("/invocations", headers={"x-starting-token": token, **names})


async def read_when_there(client: TestClient, token: str) -> ClientResponse:
    """Return the first answer that is not 202."""
    for _ in range(1000):
        if (answer := await read(client, token)).status != 202:
            return answer
        await asyncio.sleep(0.005)
    raise AssertionError("it never started")


async def test_deferred_stream_is_read_in_pieces(serve: ServeScripted, engine: GatedEngine) -> None:
    """202 before it starts, a token while more is to come, none at the end; pieces stay."""
    client = await serve()
    token = await start(client)
    first = await read_when_there(client, token)
    assert (first.status, first.content_type) == (200, "application/jsonlines")
    assert await first.read() == ROW_A
    assert first.headers["x-next-token"] == f"{token}1"
    assert first.headers[ATTRIBUTES] == f"x-next-token={token}1"
    nothing_new = await read(client, f"{token}1")
    assert (nothing_new.status, await nothing_new.read()) == (200, b"")
    assert nothing_new.headers["x-next-token"] == f"{token}1"
    engine.gate.set()
    await until(lambda: engine.running_requests == 0)
    last = await read(client, f"{token}1")
    assert (await last.read(), "x-next-token" in last.headers) == (ROW_B, False)
    part = await read(client, token, x_max_items="1")
    assert (await part.read(), part.headers["x-next-token"]) == (ROW_A, f"{token}1")
    assert await (await read(client, token)).read() == ROW_A + ROW_B


async def test_deferred_answer_that_is_not_streamed(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """The whole body is one piece, with its own content type; 202 until it is there."""
    client = await serve()
    token = await start(client, {"inputs": "x"})
    assert (await read(client, token)).status == 202
    engine.gate.set()
    answer = await read_when_there(client, token)
    assert await answer.read() == b'{"generated_text":" b"}\n'
    assert (answer.content_type, "x-next-token" in answer.headers) == ("application/json", False)


async def test_deferred_request_may_come_as_custom_attributes(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """All of it does, on SageMaker."""
    engine.gate.set()
    client = await serve()
    headers = {ATTRIBUTES: "x-synchronous=false"}
    answer = await client.post("/invocations", json=STREAM, headers=headers)
    token = answer.headers["x-next-token"]
    await until(lambda: engine.jobs != [] and engine.running_requests == 0)
    headers = {ATTRIBUTES: f"x-starting-token={token};x-max-items=1"}
    answer = await client.post("/invocations", headers=headers)
    assert (await answer.read(), answer.headers["x-next-token"]) == (ROW_A, f"{token}1")


async def test_deferred_failure_is_500_with_its_text(serve: ServeScripted) -> None:
    """What a request could not be answered for is read like an answer."""
    client = await serve()
    answer = await read_when_there(client, await start(client, {"inputs": 5}))
    text = b'{"error":"inputs: expected text or a list of texts","code":500}\n'
    assert (answer.status, await answer.read()) == (500, text)


async def test_deferred_failure_has_the_configured_status(serve: ServeScripted) -> None:
    """SERVING_SERVER_ERROR_HTTP_CODE, from the settings to the answer and its body."""
    settings = load_settings({"SERVING_SERVER_ERROR_HTTP_CODE": "599"})
    client = await serve(statuses=error_statuses(settings))
    service = client.app[SERVICE]
    service.steps.deferrals.clear()
    async with deferring(service, settings, {}, ServerEvents()):
        answer = await read_when_there(client, await start(client, {"inputs": 5}))
    body = await answer.json()
    assert (answer.status, body["code"]) == (599, 599)


async def test_deferred_stream_that_fails_ends_with_its_error_row(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """As any stream does."""
    engine.script, _ = (A, Fail(PayloadError("no more"))), engine.gate.set()
    client = await serve()
    token = await start(client)
    await until(lambda: engine.jobs != [] and engine.running_requests == 0)
    answer = await read(client, token)
    assert await answer.read() == ROW_A + b'{"error":"no more","code":424}\n'
    assert "x-next-token" not in answer.headers


@pytest.mark.parametrize(
    "token", ["", "x", "00000000-0000-4000-8000-000000000000", "0" * 36 + "-1"]
)
async def test_unknown_deferred_token(serve: ServeScripted, token: str) -> None:
    """400 that repeats it."""
    answer = await read(await serve(), token)
    assert answer.status == 400
    assert f"Invalid x-starting-token: {token}" in await answer.text()


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
async def test_deferred_max_items_must_be_a_number(
    serve: ServeScripted, engine: GatedEngine, count: str
) -> None:
    """400 that says what is expected."""
    engine.gate.set()
    client = await serve()
    answer = await read(client, await start(client), x_max_items=count)
    assert (answer.status, "x-max-items: expected" in await answer.text()) == (400, True)


async def test_deferred_pieces_come_in_batches(serve: ServeScripted, engine: GatedEngine) -> None:
    """With SERVING_CACHE_BATCH=2 a single piece is not readable, unless it is the last."""
    client = await serve()
    keep(client, DeferredResults(batch=2))
    token = await start(client)
    await until(lambda: engine.running_requests == 1)
    assert (await read(client, token)).status == 202
    engine.gate.set()
    assert await (await read_when_there(client, token)).read() == ROW_A + ROW_B


async def test_deferred_results_are_bounded(serve: ServeScripted, engine: GatedEngine) -> None:
    """The least recently read one goes, a running one is aborted and no failure, the last stays."""
    client, ended = await serve(), list[RequestSummary]()
    client.app[SERVICE].telemetry.observers.append(ended.append)
    results = keep(client, DeferredResults(capacity=2))
    tokens = [await start(client) for _ in range(2)]
    await until(lambda: engine.running_requests == 2)
    await read(client, tokens[0])
    tokens.append(await start(client))
    await until(lambda: len(engine.jobs) == 3 and engine.running_requests == 2)
    statuses = [(await read(client, token)).status for token in tokens]
    assert (statuses[1], len(results)) == (400, 2)
    assert [(one.is_disconnected, one.failure) for one in ended if one.is_background] == [
        (True, None)
    ]
    engine.gate.set()
    await until(lambda: queue_of(client).in_flight == 0)


async def test_results_of_one_client_cost_no_other_its_own() -> None:
    """Many small ones, or one that grows without an end: theirs go, finished or not."""
    results, ends = DeferredResults(capacity=4, max_bytes=1000), asyncio.Event()

    async def rows(size: int) -> AsyncIterator[bytes]:
        while not ends.is_set():
            yield b"x" * size
            await asyncio.sleep(0)
            if size < 10:
                return

    async def asked(client: str, size: int) -> str:
        enter_record(RequestRecord("id", "POST", "/", "/", client, "lmi"))

        async def answer() -> Reply:
            return Reply(200, "text/plain", stream=rows(size))

        return results.start(answer()).headers["x-next-token"]

    mine = await asyncio.create_task(asked("192.0.2.1", 1))
    for _ in range(20):
        await asyncio.create_task(asked("192.0.2.2", 1))
    assert results.read(mine, {}).status in (200, 202)
    endless = await asyncio.create_task(asked("192.0.2.3", 100))
    for _ in range(1000):
        await asyncio.sleep(0)
    with pytest.raises(BadParameterError):
        results.read(endless, {})
    ends.set()
    assert results.read(mine, {}).body == b"x"


async def test_deferred_results_are_bounded_in_bytes(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """A few large answers count like many small ones."""
    engine.gate.set()
    client = await serve()
    results = keep(client, DeferredResults(max_bytes=len(ROW_A + ROW_B)))
    for _ in range(3):
        await start(client)
        await until(lambda: queue_of(client).in_flight == 0)
    assert len(results) == 1


async def test_deferred_answer_is_read_by_its_own_key_only() -> None:
    """To another key its token is unknown."""
    results = DeferredResults()

    def request_of(key: int | None) -> None:
        record = RequestRecord("id", "POST", "/", "/", "192.0.2.1", "lmi")
        record.key = key
        enter_record(record)

    async def answer() -> Reply:
        return Reply(200, "text/plain", b"secret")

    request_of(1)
    token = results.start(answer()).headers["x-next-token"]
    for _ in range(3):
        await asyncio.sleep(0)
    for other in (0, None):
        request_of(other)
        with pytest.raises(BadParameterError, match=f"Invalid x-starting-token: {token}"):
            results.read(token, {})
    request_of(1)
    assert results.read(token, {}).body == b"secret"


async def test_texts_of_deferred_failures_are_bounded_in_bytes() -> None:
    """A refusal may repeat a field of 20 MB: 40 of them kept 800 MB."""
    results = DeferredResults(max_bytes=2500)

    async def refused() -> Reply:
        raise PayloadError("x" * 1000)

    for _ in range(5):
        results.start(refused())
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(results) == 2


async def test_deferred_request_that_does_not_fit_is_refused_at_once(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """503, no token: it would never run."""
    client = await serve(limit=1)
    await start(client)
    await until(lambda: engine.running_requests == 1)
    answer = await client.post("/invocations", json=STREAM, headers=LATER)
    assert (answer.status, "x-next-token" in answer.headers) == (503, False)
    engine.gate.set()


async def test_deferred_request_ends_with_the_drain(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """It counts as in flight; past the deadline it is ended, and says so when it is read."""
    client = await serve()
    token = await start(client)
    await read_when_there(client, token)
    queue = queue_of(client)
    assert queue.in_flight == 1
    queue.cancel_all()
    assert await queue.wait_idle(5)
    assert engine.running_requests == 0
    answer = await read(client, token)
    assert b"shut down before the answer was complete" in await answer.read()
