"""One call of an ASGI application in process: order and backpressure of what goes past a reader."""

import asyncio
from typing import Any

from lmi_vllm.engine.vllm.asgi import Exchange
from lmi_vllm.errors import LmiError
from lmi_vllm.messages import HttpCall

CALL = HttpCall("POST", "/x", "", {}, b"", "an-id")


class Direct:
    """Where chunks go of themselves while it is open."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.found: list[bytes] = []

    def read_event(self, event: bytes) -> None:
        """Keep it."""
        self.found.append(event)


def exchange(app: Any, direct: Direct | None) -> Exchange:
    """Return a call of `app`."""
    return Exchange(app, CALL, b"", lambda _: LmiError("failed"), direct)


async def numbers(_scope: Any, _receive: Any, send: Any) -> None:
    """Stream 0 to 9, a turn of the loop between two."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for number in range(10):
        await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_chunks_go_past_a_reader_that_waits() -> None:
    """All but the first, which says that it is a stream, and the last."""
    direct = Direct(is_open=False)
    reply = await exchange(numbers, direct).reply()
    assert reply.stream is not None
    stream = aiter(reply.stream)
    found = [await anext(stream)]
    direct.is_open = True
    found += [chunk async for chunk in stream]
    assert direct.found
    assert found[-1] == b"end"
    assert b"".join([*found[:-1], *direct.found, found[-1]]) == b"0123456789end"


async def test_no_chunk_overtakes_one_that_was_not_taken() -> None:
    """Nor does any while the client has to read first."""
    direct = Direct(is_open=False)
    reply = await exchange(numbers, direct).reply()
    assert reply.stream is not None
    await asyncio.sleep(0.01)  # the next chunk waits for its reader
    direct.is_open = True
    await asyncio.sleep(0.01)
    assert direct.found == []
    direct.is_open = False
    assert b"".join([chunk async for chunk in reply.stream]) == b"0123456789end"
    assert direct.found == []


async def test_client_that_has_gone_gets_nothing() -> None:
    """Its handler goes on to its end."""
    direct = Direct(is_open=False)
    one = exchange(numbers, direct)
    await one.reply()
    direct.is_open = True
    await one.aclose()
    assert direct.found == []
