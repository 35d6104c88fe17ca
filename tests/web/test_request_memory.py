"""A request's memory ends with it, however it was answered; no garbage collection is needed."""

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import pytest
from aiohttp import web

from lmi_vllm.errors import LmiError
from lmi_vllm.inference.context import RequestContext
from lmi_vllm.messages import InferenceCall, ServingProfile
from lmi_vllm.web.connection import ClientTimeouts
from lmi_vllm.web.request import WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import until

HELD = (InferenceCall, LmiError, RequestContext, web.HTTPException)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Let nothing but the end of the last reference free an object, and look at new ones only."""
    gc.collect()
    gc.disable()
    gc.freeze()  # those of libraries and of other tests are millions
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def left() -> list[object]:
    """Return the objects of requests that are still there; routes of aiohttp keep one error.

    By their types: `isinstance` asks lazy objects of torch for their class, and they warn.
    """
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), HELD) and not issubclass(type(each), web.HTTPNotFound)
    ]


def kept_bodies() -> list[bytes]:
    """Return the bodies that aiohttp's requests keep, as those of idle connections would."""
    requests = [each for each in gc.get_objects() if issubclass(type(each), web.BaseRequest)]
    return [each._read_bytes for each in requests if each._read_bytes]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", '{"inputs":"%s"}'),
        ("/invocations", '{"inputs":"%s","stream":true}'),
        ("/invocations", '{"inputs":"%s","parameters":{"temperature":-1}}'),
        ("/invocations", '{"inputs":"%s'),
        ("/invocations", '{"inputs":["%s","y"],"stream":true}'),
        ("/invocations", '{"inputs":["%s",""]}'),
        ("/invocations", '{"inputs":"%s","adapters":"none"}'),
        ("/invocations", '{"inputs":"%s","parameters":{"max_new_tokens":99999999}}'),
        ("/invocations", '{"nothing":"%s"}'),
        ("/v1/completions", '{"prompt":"%s"'),
        ("/v1/chat/completions", '{"messages":"%s"'),
        ("/nowhere", '{"inputs":"%s"}'),
    ],
)
async def test_nothing_of_an_answered_request_is_left(
    serve: ServeScripted, path: str, body: str
) -> None:
    """A refusal kept twice its body until a collection, on an idle server for ever."""
    client = await serve(ServingProfile(model_name="demo", enable_lora=True))
    with no_collections():
        for _ in range(3):
            async with client.post(
                path, data=body % "a text", headers={"Content-Type": "application/json"}
            ) as answer:
                await answer.read()
        await until(lambda: not left())
        assert not kept_bodies()


async def test_nothing_of_a_body_that_came_too_slowly_is_left(serve: ServeScripted) -> None:
    """408: the error belongs to the body that is still to come."""
    options = WebOptions(timeouts=ClientTimeouts(body=0.1))
    client = await serve(options=options)
    with no_collections():
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(b"POST /invocations HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await until(lambda: not left())
        assert not kept_bodies()
