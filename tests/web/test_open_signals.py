"""What routers read without a key, where that is asked: metrics, models, how a prompt is split."""

from typing import Final

import pytest

from lmi_vllm.errors import Dialect
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.lifecycle import State
from lmi_vllm.messages import HttpRoute, RouteKind
from lmi_vllm.web.request import Routes, WebOptions
from tests.conftest import ServeScripted
from tests.support.scripted_application import EchoingApplication as Application
from tests.web.conftest import lifecycle_of

POST: Final = frozenset({"POST"})
RENDER: Final = HttpRoute(
    "/v1/completions/render", POST, RouteKind.INFERENCE, Dialect.OPENAI, needs_engine=False
)
BATCH: Final = HttpRoute("/v1/batch", POST, RouteKind.INFERENCE, Dialect.OPENAI)
SLEEP: Final = HttpRoute("/sleep", POST, RouteKind.MANAGEMENT, Dialect.OPENAI)
READ: Final = (("GET", "/metrics"), ("GET", "/server/metrics"))
OF_MODEL: Final = (
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("POST", "/v1/completions/render"),
)
CLOSED: Final = (
    ("POST", "/v1/models"),
    ("GET", "/v1/completions/render"),
    ("POST", "/v1/batch"),
    ("POST", "/v1/completions"),
    ("POST", "/invocations"),
    ("POST", "/metrics"),
    ("GET", "/adapters"),
    ("POST", "/adapters?name=x&src=/x"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/sleep"),
    ("GET", "/console/state"),
    ("GET", "/openapi.json"),
)
OPEN: Final = {
    Routes.ALL: {*READ, *OF_MODEL},
    Routes.INFERENCE: {*OF_MODEL},
    Routes.MANAGEMENT: {*READ, *OF_MODEL},
}


@pytest.fixture(autouse=True)
def application(engine: ScriptedEngine) -> Application:
    """The application of the scripted engine, with a render route."""
    engine.http = Application(engine, (RENDER, BATCH, SLEEP))
    return engine.http


@pytest.mark.parametrize("routes", Routes)
async def test_open_signals_and_nothing_else_need_no_key(
    serve: ServeScripted, routes: Routes
) -> None:
    """By method, too; a management address has those of the model as well."""
    options = WebOptions(api_keys=("secret",), routes=routes, has_open_signals=True)
    client = await serve(options=options)
    for method, path in (*READ, *OF_MODEL, *CLOSED):
        response = await client.request(method, path, json={} if method == "POST" else None)
        is_elsewhere = (method, path) in READ and (method, path) not in OPEN[routes]
        expected = 200 if (method, path) in OPEN[routes] else 404 if is_elsewhere else 401
        assert response.status == expected, path


@pytest.mark.parametrize("routes", Routes)
async def test_closed_signals_need_the_key(serve: ServeScripted, routes: Routes) -> None:
    """Without the option nothing is open, and a management address has no models."""
    client = await serve(options=WebOptions(api_keys=("secret",), routes=routes))
    for method, path in (*READ, *OF_MODEL, *CLOSED):
        assert (await client.request(method, path)).status == 401, path
    response = await client.get("/v1/models", headers={"x-api-key": "secret"})
    assert response.status == (404 if routes is Routes.MANAGEMENT else 200)


async def test_management_address_with_signals_has_no_other_inference(
    serve: ServeScripted,
) -> None:
    """With the key, too."""
    options = WebOptions(api_keys=("secret",), routes=Routes.MANAGEMENT, has_open_signals=True)
    client = await serve(options=options)
    key = {"x-api-key": "secret"}
    for path in ("/v1/batch", "/v1/completions", "/invocations"):
        assert (await client.post(path, json={}, headers=key)).status == 404, path
    assert (await client.post("/sleep", headers=key)).status == 200


@pytest.mark.parametrize(
    ("state", "render", "batch"),
    [(State.ASLEEP, 200, 503), (State.FAILED, 503, 503), (State.HEALTHY, 200, 200)],
    ids=str,
)
async def test_prompts_are_split_while_the_engine_sleeps(
    serve: ServeScripted, state: State, render: int, batch: int
) -> None:
    """Routers ask a pod that sleeps, too; only what needs the engine is refused."""
    client = await serve()
    lifecycle_of(client).set_state(state)
    for body in ({"prompt": "x"}, {"prompt": ["x", "y"]}):
        asked = [(await client.post(route.path, json=body)).status for route in (RENDER, BATCH)]
        assert asked == [render, batch]
