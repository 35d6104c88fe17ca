"""What a request counts as when it has ended: once, and by its record."""

from typing import Any

import pytest
from aiohttp import web

from lmi_vllm.errors import EngineFailureError, Fault
from lmi_vllm.features.scripted.engine import Fail, ScriptedEngine
from lmi_vllm.web.request import RouteGroup, WebOptions
from tests.conftest import ServeScripted
from tests.web.conftest import A, lifecycle_of, until


@pytest.mark.parametrize(
    ("path", "body", "cause"),
    [
        ("/invocations", {"inputs": 5}, 424),
        ("/invocations", {"inputs": "x", "adapters": "none"}, 424),
        ("/invocations", {"inputs": "x", "stream": True}, Fault.ENGINE),
        ("/v1/completions", {"prompt": 5, "n": 10**6}, 400),
    ],
)
async def test_failure_is_counted_once(
    serve: ServeScripted,
    engine: ScriptedEngine,
    path: str,
    body: dict[str, Any],
    cause: Fault | int,
) -> None:
    """Refused before the engine, which counts by its status, or cut after the first row."""
    engine.script = (A, Fail(EngineFailureError("gone")))
    client, causes = await serve(), list[Any]()
    lifecycle_of(client).on_failure.append(causes.append)
    await (await client.post(path, json=body)).read()
    await until(lambda: causes != [])
    assert causes == [cause]


async def test_failure_of_a_page_is_not_one_of_the_model(serve: ServeScripted) -> None:
    """It is logged; the model's error rates would end the server."""

    async def broken(_: web.Request) -> web.StreamResponse:
        raise RuntimeError("a defect of a page")

    def add(app: web.Application) -> None:
        app.router.add_get("/page", broken)

    client, causes = await serve(options=WebOptions(groups=(RouteGroup(add),))), list[Any]()
    lifecycle_of(client).on_failure.append(causes.append)
    assert (await client.get("/page")).status == 500
    assert (await client.get("/nowhere")).status == 404
    assert causes == []
