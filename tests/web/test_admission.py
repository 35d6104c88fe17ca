import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import ServingProfile
from tests.conftest import ServeScripted
from tests.web.conftest import ROW_A, STREAM, A, B, GatedEngine, lifecycle_of, queue_of, until


@pytest.fixture
def engine() -> GatedEngine:
    """Return an engine that stops after its first token until its gate opens."""
    return GatedEngine(script=(A, B))


OVERLOADS = {
    "lmi": ("/invocations", {}, 503, '"type": "WlmCapacityException"'),
    "openai": ("/v1/completions", {}, 503, '"type":"ServiceUnavailableError"'),
    "tgi": ("/invocations", {"tgi_compat": True}, 429, '"error_type":"overloaded"'),
}


@pytest.mark.parametrize(("path", "profile", "status", "text"), OVERLOADS.values(), ids=OVERLOADS)
async def test_admission_overload_leaves_admitted_request_alone(
    serve: ServeScripted,
    engine: GatedEngine,
    path: str,
    profile: dict[str, Any],
    status: int,
    text: str,
) -> None:
    """With one place, the second of two is refused with Retry-After and the first completes."""
    client = await serve(ServingProfile(model_name="demo", **profile), limit=1)
    first = await client.post("/invocations", json=STREAM)
    await first.content.readany()
    second = await client.post(path, json={"inputs": "x", "prompt": "x"})
    assert (second.status, second.headers["Retry-After"]) == (status, "1")
    body = await second.text()
    assert text in body
    assert "Worker queue capacity exceeded for model: demo" in body
    engine.gate.set()
    assert b'"generated_text":" a b"' in await first.read()
    assert queue_of(client).in_flight == 0


@pytest.mark.parametrize(("path", "profile", "status", "text"), OVERLOADS.values(), ids=OVERLOADS)
async def test_admission_refuses_before_the_body_is_read(
    serve: ServeScripted,
    engine: GatedEngine,
    path: str,
    profile: dict[str, Any],
    status: int,
    text: str,
) -> None:
    """With a full queue no body is kept in memory: the answer does not wait for its end."""
    client = await serve(ServingProfile(model_name="demo", **profile), limit=1)
    first = await client.post("/invocations", json=STREAM)
    await first.content.readany()
    is_answered = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"inputs": "'
        await is_answered.wait()
        yield b'"}'

    async with asyncio.timeout(20):
        second = await client.post(path, data=body())
    assert second.status == status
    is_answered.set()
    assert text in await second.text()
    engine.gate.set()
    await first.read()


async def test_admission_of_two_at_once_one_succeeds(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """With queue size 1, of two parallel requests exactly one succeeds."""
    client = await serve(limit=1)
    calls = [asyncio.create_task(client.post("/invocations", json=STREAM)) for _ in range(2)]
    statuses = sorted([(await call).status for call in calls])
    engine.gate.set()
    assert statuses == [200, 503]


LISTS = {"fits": (3, 200), "as long as the queue": (4, 200), "longer than the queue": (5, 424)}


@pytest.mark.parametrize(("count", "status"), LISTS.values(), ids=LISTS)
async def test_admission_list_counts_each_element(
    serve: ServeScripted, engine: GatedEngine, count: int, status: int
) -> None:
    """A list longer than the queue could never be served: that is the client's fault."""
    engine.gate.set()
    client = await serve(limit=4)
    response = await client.post("/invocations", json={"inputs": ["x"] * count})
    assert (response.status, queue_of(client).in_flight) == (status, 0)


async def test_admission_list_that_does_not_fit_now_is_overload(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """A list whose elements find no place now is refused whole, and holds none."""
    client = await serve(limit=3)
    first = await client.post("/invocations", json=STREAM)
    refused = await client.post("/invocations", json={"inputs": ["x"] * 3})
    assert (refused.status, queue_of(client).in_flight) == (503, 1)
    engine.gate.set()
    await first.read()


PLACES = {
    "answer": {"inputs": "x"},
    "stream": STREAM,
    "client fault": {"inputs": 5},
    "no family": {},
    "unknown adapter": {"inputs": "x", "adapters": "nobody"},
    "openai": {"prompt": "x"},
    "openai stream": {"prompt": "x", "stream": True},
    "openai unknown adapter": {"prompt": "x", "adapters": "nobody"},
}


@pytest.mark.parametrize("body", PLACES.values(), ids=PLACES)
async def test_admission_place_is_given_back(
    serve: ServeScripted, engine: GatedEngine, body: object
) -> None:
    """However a request ends, its place in the queue is free again."""
    engine.gate.set()
    client = await serve()
    await (await client.post("/invocations", json=body)).read()
    assert (queue_of(client).in_flight, engine.running_requests) == (0, 0)


async def test_admission_disconnect_frees_engine_and_place(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """A client that disconnects mid-stream ends its request in the engine first, then its place."""
    client = await serve()
    response = await client.post("/invocations", json=STREAM)
    assert await response.content.readany() == ROW_A
    assert (engine.running_requests, queue_of(client).in_flight) == (1, 1)
    response.close()
    await until(lambda: not queue_of(client).in_flight)
    assert engine.running_requests == 0


@pytest.mark.parametrize("body", [{"inputs": "x"}, {"inputs": ["x", "y"]}], ids=["one", "list"])
async def test_admission_disconnect_ends_waiting_answer(
    serve: ServeScripted, engine: GatedEngine, body: object
) -> None:
    """A client that disconnects before its whole answer ends every generation of it."""
    client = await serve()
    call = asyncio.create_task(client.post("/invocations", json=body))
    await until(lambda: engine.running_requests > 0)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: not queue_of(client).in_flight)
    assert engine.running_requests == 0


REFUSALS = {
    State.PENDING: ("5", "settings phase"),
    State.FAILED: ("5", "engine has failed"),
    State.ASLEEP: ("5", "is asleep: POST /wake_up"),
    State.DRAINING: ("30", "draining"),
}
SHAPES = {
    "/invocations": "ServiceUnavailableException",
    "/v1/completions": "ServiceUnavailableError",
}


@pytest.mark.parametrize(("path", "kind"), SHAPES.items(), ids=SHAPES)
@pytest.mark.parametrize(("state", "refusal"), REFUSALS.items(), ids=str)
async def test_admission_not_ready_is_503(
    serve: ServeScripted, state: State, refusal: tuple[str, str], path: str, kind: str
) -> None:
    """Before, after and while draining, inference says why not and when to come back."""
    client = await serve(is_ready=state is not State.PENDING)
    lifecycle_of(client).set_state(state)
    response = await client.post(path, json={"inputs": "x"})
    assert (response.status, response.headers["Retry-After"]) == (503, refusal[0])
    body = await response.text()
    assert refusal[1] in body
    assert kind in body


@pytest.mark.parametrize("path", ["/metrics", "/server/metrics"])
async def test_admission_not_ready_still_describes(serve: ServeScripted, path: str) -> None:
    """Before it is ready the server answers what needs no engine."""
    assert (await (await serve(is_ready=False)).get(path)).status == 200


async def test_admission_draining_lets_running_stream_end(
    serve: ServeScripted, engine: GatedEngine
) -> None:
    """A stream that began before draining comes to its end."""
    client = await serve()
    response = await client.post("/invocations", json=STREAM)
    lifecycle_of(client).set_state(State.DRAINING)
    assert (await client.post("/invocations", json=STREAM)).status == 503
    engine.gate.set()
    assert (await response.read()).endswith(b'"generated_text":" a b"}\n')
    assert await queue_of(client).wait_idle(5)
