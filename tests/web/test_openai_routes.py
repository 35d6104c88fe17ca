"""vLLM's routes: which handler each reaches, in whose dialect they refuse."""

import re

import pytest

from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.web.request import OPENAI_ROUTES, WebOptions
from tests.conftest import ServeScripted
from tests.support.queue import admitted
from tests.support.scripted_application import ROUTES
from tests.web.conftest import queue_of

POSTED = {path: kind for path, kind in OPENAI_ROUTES.items() if kind != "models"}
POSTED |= {
    path: re.sub(r"^(/v\d)?/", "", path) for path in (r.path for r in ROUTES) if "{" not in path
}


@pytest.mark.parametrize(("path", "kind"), POSTED.items(), ids=POSTED)
async def test_openai_route_reaches_its_handler(
    serve: ServeScripted, engine: ScriptedEngine, path: str, kind: str
) -> None:
    """Each path is POST, and carries the body on as it came."""
    client = await serve()
    assert (await client.post(path, json={"input": "x"})).status == 200
    assert (engine.calls[0].kind, dict(engine.calls[0].body)) == (kind, {"input": "x"})
    assert (await client.get(path)).status == 405


@pytest.mark.parametrize("path", POSTED)
async def test_openai_route_refuses_in_openai_s_shape(serve: ServeScripted, path: str) -> None:
    """A broken body and a missing key are answered in vLLM's error object."""
    client = await serve(options=WebOptions(api_keys=("secret",)))
    response = await client.post(path, data=b"{")
    assert response.status == 401
    assert (await response.json())["error"]["type"] == "AuthenticationError"
    response = await client.post(path, data=b"{", headers={"x-api-key": "secret"})
    assert response.status == 400
    assert (await response.json())["error"]["code"] == 400


async def test_stored_response_is_asked_for_by_its_id(
    serve: ServeScripted, engine: ScriptedEngine
) -> None:
    """Or cancelled; no place in the queue is needed for either."""
    client = await serve(limit=1)
    with admitted(queue_of(client)):
        assert (await client.get("/v1/responses/r_1?starting_after=3&stream=true")).status == 200
        assert (await client.post("/v1/responses/r_1/cancel")).status == 200
    assert [call.kind for call in engine.calls] == ["responses/r_1", "responses/r_1/cancel"]
    assert (await client.post("/v1/responses/r_1")).status == 405
    assert (await client.get("/v1/responses/r_1/cancel")).status == 405
