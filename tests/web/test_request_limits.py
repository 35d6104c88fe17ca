"""What a feature limits holds on every route that asks the model."""

from typing import Any

import pytest

from lmi_vllm.errors import BadParameterError
from lmi_vllm.features.scripted.engine import ScriptedEngine
from lmi_vllm.inference.context import RequestContext
from lmi_vllm.messages import ServingProfile
from lmi_vllm.web.request import SERVICE
from tests.conftest import ServeScripted
from tests.support.scripted_application import ROUTES as ROUTES_OF_VLLM
from tests.support.scripted_application import EchoingApplication as Application
from tests.web.conftest import queue_of

ROUTES: dict[str, dict[str, Any]] = {
    "/invocations": {"inputs": "x"},
    "/predictions/demo": {"inputs": "x", "stream": True},
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/score": {"queries": "x"},
    "/generate": {"inputs": "x"},
    "/tokenize": {"inputs": "x"},
    "/chat_tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "/v2/models/demo/infer": {
        "inputs": [{"name": "inputs", "shape": [1], "datatype": "BYTES", "data": ["x"]}]
    },
}


@pytest.mark.parametrize(("path", "body"), ROUTES.items(), ids=ROUTES)
async def test_limit_of_a_feature_holds_on_every_route(
    serve: ServeScripted, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    """A limit that ran on `/invocations` alone was no limit: `/v1` and vLLM's routes went by it."""
    engine.http = Application(engine, ROUTES_OF_VLLM)
    client = await serve(ServingProfile(model_name="demo", tgi_compat=True))
    seen = []

    def refuse(context: RequestContext) -> None:
        seen.append(context.call.request_id)
        raise BadParameterError("this tenant has had enough")

    client.app[SERVICE].steps.limits.append(refuse)
    answer = await client.post(path, json=body, headers={"x-request-id": "its-id"})
    assert (answer.status, seen) == (400, ["its-id"])
    assert "this tenant has had enough" in await answer.text()
    assert (queue_of(client).in_flight, engine.jobs, engine.calls) == (0, [], [])


async def test_questions_about_the_server_are_not_limited(serve: ServeScripted) -> None:
    """The list of models asks nothing of the model."""
    client = await serve()

    def refuse(_: RequestContext) -> None:
        raise BadParameterError("no")

    client.app[SERVICE].steps.limits.append(refuse)
    assert (await client.get("/v1/models")).status == 200
