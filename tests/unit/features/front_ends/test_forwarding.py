"""A further front-end process answers shared work and hands on the rest, byte by byte."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from pytest_aiohttp import AiohttpClient

from lmi_vllm.assembly import create_app
from lmi_vllm.features.front_ends.forwarding import Forwarder
from lmi_vllm.inference.lifecycle import Lifecycle, State
from lmi_vllm.inference.queue import RequestQueue
from lmi_vllm.inference.service import InferenceService
from lmi_vllm.web.request import PEER, WebOptions
from tests.conftest import packed_server
from tests.web.conftest import lifecycle_of

PIECES = 5


async def tell(request: web.Request) -> web.StreamResponse:
    """Say what arrived at the first process."""
    body = await request.read()
    headers = [f"{name}: {value}" for name, value in request.headers.items()]
    return web.json_response(
        {
            "method": request.method,
            "path": request.raw_path,
            "headers": headers,
            "body": body.decode("latin-1"),
        },
        headers=[("x-request-id", "of the first"), ("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")],
    )


async def stream(request: web.Request) -> web.StreamResponse:
    """Stream pieces, each when the one before has been read."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number in range(PIECES):
        await response.write(f"data: {number}\n\n".encode())
    await response.write_eof()
    return response


async def refuse(_: web.Request) -> web.StreamResponse:
    """Refuse, and close the connection."""
    response = web.json_response({"code": 507}, status=507, reason="No Room")
    response.force_close()
    return response


@pytest.fixture
async def second(
    tmp_path: Path, aiohttp_client: AiohttpClient
) -> AsyncIterator[TestClient[Any, Any]]:
    """A client of a process that is not the first; without an engine it answers with errors."""
    first = web.Application()
    first.router.add_get("/v1/responses/stream", stream)
    first.router.add_post("/adapters", refuse)
    first.router.add_route("*", "/{path:.*}", tell)
    runner = web.AppRunner(first)
    await runner.setup()
    socket = str(tmp_path / "first.sock")
    await web.UnixSite(runner, socket).start()
    forwarder = Forwarder(socket)
    service = InferenceService(RequestQueue(Lifecycle()))
    service.steps.is_process_bound.append(lambda properties: "x-bound" in properties)
    service.lifecycle.set_state(State.HEALTHY)
    client = await aiohttp_client(
        await packed_server(create_app(service, WebOptions(proxy=forwarder)))
    )
    yield client
    await forwarder.close()
    await runner.cleanup()


OWN = (
    ("POST", "/invocations", {}),
    ("POST", "/predictions/m", {}),
    ("POST", "/models/m/invoke", {}),
    ("POST", "/v1/chat/completions", {}),
    ("POST", "/tokenize", {}),
    ("POST", "/generate_stream", {}),
    ("POST", "/v2/models/m/infer", {}),
    ("POST", "/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/completions"}),
)
FORWARDED = (
    ("GET", "/ping", {}),
    ("GET", "/metrics?name%5B%5D=a&name%5B%5D=b%20c", {}),
    ("GET", "/invocations", {}),
    ("POST", "/v1/responses", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v2/models/m", {}),
    ("DELETE", "/adapters/a%2Fb", {}),
    ("POST", "/nowhere", {}),
    ("POST", "/invocations", {"X-Bound": "1"}),
    ("POST", "/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "x-bound=abc"}),
    # The first process sees what was sent, and decides which routes may be named.
    ("POST", "/invocations?a=b", {"X-Amzn-SageMaker-Custom-Attributes": "route=/adapters"}),
    ("POST", "/invocations", {"X-Amzn-SageMaker-Custom-Attributes": "route=/v1/responses"}),
    ("POST", "/adapters/invoke", {}),
)


@pytest.mark.parametrize(("method", "path", "headers"), OWN)
async def test_shared_work_is_answered_here(
    second: TestClient[Any, Any], method: str, path: str, headers: dict[str, str]
) -> None:
    """Inference is every process's work; without a model it is refused in this process's words."""
    answer = await second.request(method, path, headers=headers, data=b"{}")
    assert answer.headers.get("x-request-id") != "of the first"


@pytest.mark.parametrize(("method", "path", "headers"), FORWARDED)
async def test_other_requests_are_forwarded_to_the_first(
    second: TestClient[Any, Any], method: str, path: str, headers: dict[str, str]
) -> None:
    """Method, path, query and headers as they came; the answer's headers as they are."""
    answer = await second.request(method, path, headers={**headers, "X-Own": "ä"}, data=b"\x00\xff")
    told = await answer.json()
    assert (told["method"], told["path"]) == (method, path)
    assert told["body"] == "\x00ÿ"
    assert "X-Own: ä" in told["headers"]
    assert f"Host: {second.host}:{second.port}" in told["headers"]
    assert answer.headers.getall("x-request-id") == ["of the first"]
    assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert "Cache-Control" not in answer.headers  # the first process would have said so


async def test_unhealthy_front_end_forwards_every_request(
    second: TestClient[Any, Any],
) -> None:
    """It knows why, and says it once for all."""
    for state, has_model in ((State.DRAINING, True), (State.HEALTHY, False)):
        lifecycle_of(second).mirror(state, has_model=has_model)
        answer = await second.post("/invocations", json={"inputs": "x"})
        assert answer.headers["x-request-id"] == "of the first"


async def test_a_compressed_body_stays_so(second: TestClient[Any, Any]) -> None:
    """The first process unpacks it."""
    packed = gzip.compress(b"text")
    answer = await second.put("/x", data=packed, headers={"Content-Encoding": "gzip"})
    told = await answer.json()
    assert told["body"] == "text"
    assert any(line.lower().startswith("content-encoding") for line in told["headers"])


async def test_a_stream_passes_through(second: TestClient[Any, Any]) -> None:
    """All pieces, in order."""
    answer = await second.get("/v1/responses/stream")
    assert answer.headers["Content-Type"] == "text/event-stream"
    assert (await answer.read()).count(b"data: ") == PIECES


async def test_a_refusal_passes_through(second: TestClient[Any, Any]) -> None:
    """Status and reason are the first process's; the connection ends as it said."""
    answer = await second.post("/adapters", data=b"x")
    assert (answer.status, answer.reason) == (507, "No Room")
    assert answer.headers["Connection"] == "close"


async def test_invalid_request_is_refused_by_the_front_end(second: TestClient[Any, Any]) -> None:
    """An unknown expectation, and a path that is none."""
    answer = await second.post("/adapters", data=b"x", headers={"Expect": "miracles"})
    assert answer.status == 417
    reader, writer = await asyncio.open_connection(second.host, second.port)
    writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
    writer.close()
    assert answer.headers["x-request-id"]


async def test_first_process_is_given_the_request_id(second: TestClient[Any, Any]) -> None:
    """The header of a client is dropped."""
    told = await (await second.get("/x", headers={PEER: "somebody"})).json()
    assert [line for line in told["headers"] if line.lower().startswith(PEER)] == [
        f"{PEER}: 127.0.0.1"
    ]


async def test_dead_first_process_is_503(tmp_path: Path, aiohttp_client: AiohttpClient) -> None:
    """Health without its process is no health."""
    forwarder = Forwarder(str(tmp_path / "missing"))
    service = InferenceService(RequestQueue(Lifecycle()))
    client = await aiohttp_client(
        await packed_server(create_app(service, WebOptions(proxy=forwarder)))
    )
    answer = await client.get("/ping")
    assert answer.status == 503
    assert answer.headers["x-request-id"]
    assert "does not answer" in await answer.text()
    await forwarder.close()
