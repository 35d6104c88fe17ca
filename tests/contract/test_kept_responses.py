"""Responses that are kept for later belong to the API key that asked for them, and are bounded."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_vllm.engine.base import Engine, HttpApplication
from lmi_vllm.engine.vllm.workarounds.kept_responses import keep_by_client
from lmi_vllm.errors import Dialect, RequestError
from lmi_vllm.messages import HttpCall, OpenAIReply
from lmi_vllm.telemetry.records import RequestRecord, enter_record
from tests.contract.conftest import LoopThread

pytestmark = pytest.mark.vllm

ALICE, BOB = 0, 1
PATH = "/v1/responses"
LONG = {"background": True, "max_output_tokens": 400, "temperature": 0}


@pytest.fixture
def application(vllm_engine: Engine) -> HttpApplication:
    """The application over the session's engine."""
    assert vllm_engine.http is not None
    return vllm_engine.http


@pytest.fixture
def responses(application: HttpApplication) -> Iterator[Any]:
    """The handler of vLLM, as it is with VLLM_ENABLE_RESPONSES_API_STORE, with nothing kept."""
    handler = application.app.state.openai_serving_responses  # type: ignore[attr-defined]
    before = dict(vars(handler))
    del handler.responses_background_stream_generator  # the class's own
    handler.enable_store = True
    keep_by_client(handler)
    yield handler
    vars(handler).update(before)


@contextlib.contextmanager
def request_of(key: int) -> Iterator[RequestRecord]:
    """A request with this API key, while the body runs."""
    record = RequestRecord("an-id", "POST", PATH, PATH, "-", Dialect.OPENAI, key=key)
    enter_record(record)
    try:
        yield record
    finally:
        record.end(200)


async def call(
    application: HttpApplication, key: int, method: str, path: str, **body: Any
) -> tuple[int, Any]:
    """One whole request; returns its status and its answer, or a stream's last event."""
    path, _, query = path.partition("?")
    headers = [(b"content-type", b"application/json")]
    sent = json.dumps({"model": "lmi", "input": "x", **body}).encode() if body else b""
    with request_of(key):
        reply = await application.call(HttpCall(method, path, query, headers, sent, "an-id"))
        return reply.status, await read(reply)


async def read(reply: OpenAIReply) -> Any:
    """Return the whole answer, or the last event."""
    if not reply.content_type.startswith("text/event-stream"):
        return json.loads(reply.body)
    pieces = [] if reply.stream is None else [piece async for piece in reply.stream]
    text = (b"".join(pieces) or reply.body).decode()
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return json.loads(lines[-1][6:]) if lines else None


@pytest.mark.usefixtures("responses")
def test_response_is_found_by_its_own_key_only(
    run: LoopThread, application: HttpApplication
) -> None:
    """Not to read, to continue or to cancel; and another key may use the same id."""

    async def asked() -> None:
        mine = {"request_id": "resp_1", "max_output_tokens": 2}
        assert (await call(application, ALICE, "POST", PATH, **mine))[0] == 200
        assert (await call(application, ALICE, "GET", f"{PATH}/resp_1"))[1]["id"] == "resp_1"
        assert (await call(application, BOB, "GET", f"{PATH}/resp_1"))[0] == 404
        assert (await call(application, BOB, "POST", f"{PATH}/resp_1/cancel"))[0] == 404
        follows = {"previous_response_id": "resp_1", "max_output_tokens": 2}
        assert (await call(application, BOB, "POST", PATH, **follows))[0] == 404
        assert (await call(application, ALICE, "POST", PATH, **follows))[0] == 200
        own = {**mine, "metadata": {"of": "bob"}}
        assert (await call(application, BOB, "POST", PATH, **own))[0] == 200
        _, alice = await call(application, ALICE, "GET", f"{PATH}/resp_1")
        _, bob = await call(application, BOB, "GET", f"{PATH}/resp_1")
        assert [alice["metadata"], bob["metadata"]] == [None, {"of": "bob"}]
        with pytest.raises(RequestError, match=r"^request_id: a response with this id exists"):
            await call(application, ALICE, "POST", PATH, **mine)

    run(asked())


@pytest.mark.usefixtures("responses")
def test_response_is_cancelled_by_its_own_key_and_its_streams_end(
    run: LoopThread, application: HttpApplication, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that begins later gets the same events, and an end too."""

    async def asked() -> None:
        first = asyncio.create_task(
            call(application, ALICE, "POST", PATH, **LONG, stream=True, request_id="resp_2")
        )
        status = 0
        while status != 200:  # it has begun
            await asyncio.sleep(0.02)
            status, _ = await call(application, ALICE, "GET", f"{PATH}/resp_2")
        later = asyncio.create_task(call(application, ALICE, "GET", f"{PATH}/resp_2?stream=true"))
        await asyncio.sleep(0.02)
        assert (await call(application, BOB, "POST", f"{PATH}/resp_2/cancel"))[0] == 404
        assert not first.done()
        cancelled = await call(application, ALICE, "POST", f"{PATH}/resp_2/cancel")
        assert cancelled[1]["status"] == "cancelled"
        (one, last), (other, other_last) = await asyncio.wait_for(asyncio.gather(first, later), 10)
        assert (one, other, last) == (200, 200, other_last)
        for after in (99999, -99999):
            path = f"{PATH}/resp_2?stream=true&starting_after={after}"
            assert (await asyncio.wait_for(call(application, ALICE, "GET", path), 10))[0] == 200

    run(asked())
    assert "was cancelled" not in caplog.text  # vLLM logs an error with a traceback


def test_client_that_keeps_the_most_loses_its_oldest(
    run: LoopThread, application: HttpApplication, responses: Any
) -> None:
    """By number, then by the bytes that it sent; another client's stays."""

    async def kept(most: int, most_bytes: int, metadata: dict[str, str]) -> list[list[str]]:
        keep_by_client(responses, most, most_bytes)
        for key, number in ((BOB, 1), (ALICE, 1), (ALICE, 2), (ALICE, 3)):
            own = {"request_id": f"resp_{number}", "max_output_tokens": 1}
            await call(application, key, "POST", PATH, **own, metadata=metadata)
        found = []
        for key in (ALICE, BOB):
            with request_of(key):
                found.append(list(responses.response_store))
        return found

    assert run(kept(3, 1 << 20, {"a": ""})) == [["resp_2", "resp_3"], ["resp_1"]]
    assert run(kept(9, 250_000, {"a": "x" * 70_000})) == [["resp_2", "resp_3"], ["resp_1"]]
    short = {str(number): "x" for number in range(430)}  # 5 KB, which take 70
    assert run(kept(9, 250_000, short)) == [["resp_2", "resp_3"], ["resp_1"]]


def test_request_that_fails_keeps_nothing(
    run: LoopThread, application: HttpApplication, responses: Any
) -> None:
    """A client that leaves before the end has no response to find."""

    async def left() -> int:
        request = asyncio.create_task(
            call(application, ALICE, "POST", PATH, max_output_tokens=400, temperature=0)
        )
        with request_of(ALICE):
            while not responses.msg_store:  # noqa: ASYNC110 - vLLM says nothing
                await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
            return len(responses.msg_store)

    assert run(left()) == 0


def test_plain_vllm_keeps_every_response_for_everyone(run: LoopThread, responses: Any) -> None:
    """Its stores are dictionaries that nothing is taken from."""
    plain = SimpleNamespace(response_store={"a": "alice's"}, response_store_lock=asyncio.Lock())

    async def read_by_bob() -> Any:
        with request_of(BOB):
            return await type(responses).retrieve_responses(plain, "a", None, None)

    assert run(read_by_bob()) == "alice's"


def test_plain_vllm_never_ends_the_stream_of_a_cancelled_response(
    run: LoopThread, responses: Any
) -> None:
    """It waits for an event that never comes."""

    async def first_event() -> None:
        plain = SimpleNamespace(event_store={"a": (deque(), asyncio.Event())}, background_tasks={})
        events = type(responses).responses_background_stream_generator(plain, "a")
        await asyncio.wait_for(anext(events), 0.1)

    with pytest.raises(TimeoutError):
        run(first_event())
